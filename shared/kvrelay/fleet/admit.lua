-- Admits one request of an API key, if its rate and its concurrency allow it; all routers share the two.
--
-- KEYS[1]  rate: theoretical arrival time in ms (generic cell rate algorithm, ITU-T I.371)
-- KEYS[2]  running: request id -> end of its lease in ms, so that those of a dead router go by themselves
-- ARGV     request id, lease in ms, ms between requests (0: no limit), burst, concurrency (0: no limit)
-- returns  {"", 0} when admitted, else {"rate" or "concurrency", ms to wait}; refused, nothing is counted
local request, lease = ARGV[1], tonumber(ARGV[2])
local interval, burst, concurrency = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000

if concurrency > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  if redis.call('ZCARD', KEYS[2]) >= concurrency then
    local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
    return {'concurrency', math.ceil(tonumber(first[2]) - now)}
  end
end
if interval > 0 then
  local stored = tonumber(redis.call('GET', KEYS[1]) or '0')
  if stored > now + burst * interval + 1 then
    stored = 0 -- the clock was set back: the key must not be refused until it is as late again
  end
  local arrival = math.max(stored, now)
  local wait = arrival + interval - burst * interval - now
  if wait > 0 then
    return {'rate', math.ceil(wait)}
  end
  redis.call('SET', KEYS[1], string.format('%.3f', arrival + interval), 'PX', math.ceil(arrival + interval - now))
end
if concurrency > 0 then
  redis.call('ZADD', KEYS[2], now + lease, request)
  redis.call('PEXPIRE', KEYS[2], lease)
end
return {'', 0}
