-- Retires a range whose worker leaves: its blocks are swept later, and nobody is sent there from now on.
--
-- KEYS[1]  base
-- ARGV     slot, range id
-- returns  1 when the range was still there, else 0
local base, slot, range_id = KEYS[1], ARGV[1], ARGV[2]
local holder = redis.call('HGET', base .. ':slots', slot)
if not holder or string.match(holder, '^%S+') ~= range_id then
  return 0
end
redis.call('HDEL', base .. ':slots', slot)
redis.call('HDEL', base .. ':seqs', slot)
redis.call('ZREM', base .. ':leases', slot)
redis.call('HSET', base .. ':retired', slot, range_id)
redis.call('XADD', base .. ':stream', '*', 'e', cmsgpack.pack({ 'r', tonumber(slot), range_id }))
return 1
