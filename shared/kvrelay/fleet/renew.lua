-- Extends a lease and replaces the record; takes the slot again if Redis has lost it.
--
-- KEYS[1]  leases: slot -> "<expiry in ms> <incarnation> <worker id>"
-- KEYS[2]  records: slot -> msgpack
-- ARGV     worker id, incarnation, record, ttl in ms, slot
-- returns  "" when renewed, else the incarnation that holds the slot, or that is a later start of this worker
local worker, incarnation, record, slot = ARGV[1], ARGV[2], ARGV[3], ARGV[5]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- The longest lease that a worker may ask for (`peer_timeout_s`). A later expiry is from before the clock was set back.
local longest = 600000

local leases = redis.call('HGETALL', KEYS[1])
for i = 1, #leases, 2 do
  local expiry, holder, owner = string.match(leases[i + 1], '^(%d+) (%S+) (.*)$')
  local is_held = tonumber(expiry) > now and tonumber(expiry) <= now + longest
  if holder ~= incarnation and is_held and (leases[i] == slot or owner == worker) then
    return holder
  end
end

local expiry = string.format('%d', now + tonumber(ARGV[4]))
redis.call('HSET', KEYS[1], slot, expiry .. ' ' .. incarnation .. ' ' .. worker)
redis.call('HSET', KEYS[2], slot, record)
return ''
