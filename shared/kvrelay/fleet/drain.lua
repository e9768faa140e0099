-- Marks a worker as draining for all routers, or takes the mark back. It holds for this start of the worker alone.
--
-- KEYS[1]  leases, KEYS[2] drains: worker id -> incarnation
-- ARGV     worker id, "1" to drain or "0" to take it back
-- returns  the worker's incarnation, or "" where no lease of such a worker holds
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local found, alive = '', {}
local leases = redis.call('HGETALL', KEYS[1])
for i = 1, #leases, 2 do
  local expiry, incarnation, worker = string.match(leases[i + 1], '^(%d+) (%S+) (.*)$')
  if tonumber(expiry) > now then
    alive[worker] = true
    if worker == ARGV[1] then
      found = incarnation
    end
  end
end
for _, worker in ipairs(redis.call('HKEYS', KEYS[2])) do
  if not alive[worker] then
    redis.call('HDEL', KEYS[2], worker)
  end
end
if found ~= '' then
  if ARGV[2] == '1' then
    redis.call('HSET', KEYS[2], ARGV[1], found)
  else
    redis.call('HDEL', KEYS[2], ARGV[1])
  end
end
return found
