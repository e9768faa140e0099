-- The records of all workers whose lease holds.
--
-- KEYS[1]  leases, KEYS[2] records, KEYS[3] drains: worker id -> incarnation
-- returns  a list of records (msgpack), in no order, each followed by "1" where it shall drain
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- The longest lease that a worker may ask for (`peer_timeout_s`). A later expiry is from before the clock was set back.
local longest = 600000

local records = {}
local leases = redis.call('HGETALL', KEYS[1])
for i = 1, #leases, 2 do
  local expiry, incarnation, worker = string.match(leases[i + 1], '^(%d+) (%S+) (.*)$')
  if tonumber(expiry) > now and tonumber(expiry) <= now + longest then
    local record = redis.call('HGET', KEYS[2], leases[i])
    if record then
      records[#records + 1] = record
      records[#records + 1] = redis.call('HGET', KEYS[3], worker) == incarnation and '1' or ''
    end
  end
end
return records
