-- The records of all workers whose lease holds.
--
-- KEYS[1]  leases, KEYS[2] records
-- returns  a list of records (msgpack), in no order
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local records = {}
local leases = redis.call('HGETALL', KEYS[1])
for i = 1, #leases, 2 do
  if tonumber(string.match(leases[i + 1], '^(%d+) ')) > now then
    local record = redis.call('HGET', KEYS[2], leases[i])
    if record then
      records[#records + 1] = record
    end
  end
end
return records
