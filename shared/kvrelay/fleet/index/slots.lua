-- All ranges, and where the stream stands: what a replica begins with, and is held against.
--
-- KEYS[1]  base
-- returns  epoch ("" in an index that was never used), the stream's last id, number of retired slots,
--          and a list: slot, "<range id> <worker id>", sequence number, slot, ...
local base = KEYS[1]
local last_id = '0-0'
if redis.call('EXISTS', base .. ':stream') == 1 then
  local info = redis.call('XINFO', 'STREAM', base .. ':stream')
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      last_id = info[i + 1]
    end
  end
end
local ranges = {}
local slots = redis.call('HGETALL', base .. ':slots')
for i = 1, #slots, 2 do
  ranges[#ranges + 1] = slots[i]
  ranges[#ranges + 1] = slots[i + 1]
  ranges[#ranges + 1] = redis.call('HGET', base .. ':seqs', slots[i]) or '0'
end
return { redis.call('GET', base .. ':epoch') or '', last_id, redis.call('HLEN', base .. ':retired'), ranges }
