-- Takes the smallest free slot for a worker, which is listed from its first renewal on.
--
-- KEYS[1]  leases: slot -> "<expiry in ms> <incarnation> <worker id>"
-- KEYS[2]  records: slot -> msgpack
-- ARGV     worker id, incarnation, ttl in ms, number of slots, an incarnation of this worker that has ended ("": none)
-- returns  {slot}, {-1} if all are taken, or {-2, incarnation, expiry in ms, record} if another incarnation of this
--          worker holds a slot
--
-- The lease of the incarnation that has ended is removed here, so that a worker is never listed twice.
local worker, incarnation = ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- The longest lease that a worker may ask for (`peer_timeout_s`). A later expiry is from before the clock was set back.
local longest = 600000

local taken = {}
local leases = redis.call('HGETALL', KEYS[1])
for i = 1, #leases, 2 do
  local expiry, holder, owner = string.match(leases[i + 1], '^(%d+) (%S+) (.*)$')
  local is_held = tonumber(expiry) > now and tonumber(expiry) <= now + longest
  if not is_held or (owner == worker and (holder == incarnation or holder == ARGV[5])) then
    redis.call('HDEL', KEYS[1], leases[i])
    redis.call('HDEL', KEYS[2], leases[i])
  elseif owner == worker then
    return {-2, holder, expiry, redis.call('HGET', KEYS[2], leases[i]) or ''}
  else
    taken[leases[i]] = true
  end
end

for slot = 0, tonumber(ARGV[4]) - 1 do
  local name = tostring(slot)
  if not taken[name] then
    local expiry = string.format('%d', now + tonumber(ARGV[3]))
    redis.call('HSET', KEYS[1], name, expiry .. ' ' .. incarnation .. ' ' .. worker)
    return {slot}
  end
end
return {-1}
