-- Gives a slot back, if this incarnation still holds it.
--
-- KEYS[1]  leases, KEYS[2] records
-- ARGV     incarnation, slot
-- returns  1 when the slot was given back, else 0
local lease = redis.call('HGET', KEYS[1], ARGV[2])
if lease and string.match(lease, '^%d+ (%S+)') == ARGV[1] then
  redis.call('HDEL', KEYS[1], ARGV[2])
  redis.call('HDEL', KEYS[2], ARGV[2])
  return 1
end
return 0
