-- Stores a response, and drops others until the bounds hold: those that expired, then, of the owner with the most bytes,
-- those that were not used for the longest time. So no owner displaces the few responses of others.
--
-- ARGV     owner, id, response, its bytes, most bytes, most responses, ms that a response is kept after its last use
local owner, id, response, size = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local most_bytes, most_responses, kept_ms = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])

drop(owner, id)
redis.call('SET', value_of(owner, id), response, 'PX', kept_ms)
redis.call('HSET', KEYS[2], owner .. ' ' .. id, size)
redis.call('HINCRBY', KEYS[2], '', size)
redis.call('ZINCRBY', KEYS[3], size, owner)
note_use(owner, id)

local expiry = as_text(now - kept_ms * 1000)
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', expiry, 'LIMIT', 0, 100)) do
  local of, expired = string.match(member, '^(%S*) (.*)$')
  drop(of, expired)
end
while tonumber(redis.call('HGET', KEYS[2], '')) > most_bytes or redis.call('HLEN', KEYS[2]) - 1 > most_responses do
  local largest = redis.call('ZREVRANGE', KEYS[3], 0, 0)[1]
  local oldest = largest and redis.call('ZRANGE', order_of(largest), 0, 0)[1]
  if not oldest then -- another program changed the keys
    redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
    break
  end
  drop(largest, oldest)
end
