-- Responses that all routers share, by owner and id; ARGV[1] names an operation.
--
-- KEYS[1]  order: "OWNER ID" -> us of the last use, of all responses
-- KEYS[2]  sizes: "OWNER ID" -> bytes, and "" -> their sum
-- KEYS[3]  owners: OWNER -> bytes of its responses
-- Further keys have the name of KEYS[1], whose hash tag keeps them on its node:
--   NAME:OWNER     ID -> us of the last use, of one owner's responses
--   NAME:OWNER:ID  a response, which expires by itself
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function as_text(us) -- Lua's own has 14 digits
  return string.format('%.0f', us)
end

local function order_of(owner)
  return KEYS[1] .. ':' .. owner
end

local function value_of(owner, id)
  return KEYS[1] .. ':' .. owner .. ':' .. id
end

local function note_use(owner, id)
  redis.call('ZADD', KEYS[1], as_text(now), owner .. ' ' .. id)
  redis.call('ZADD', order_of(owner), as_text(now), id)
end

local function drop(owner, id)
  local member = owner .. ' ' .. id
  local size = tonumber(redis.call('HGET', KEYS[2], member) or '0')
  redis.call('DEL', value_of(owner, id))
  if size == 0 then
    return
  end
  redis.call('HDEL', KEYS[2], member)
  redis.call('HINCRBY', KEYS[2], '', -size)
  redis.call('ZREM', KEYS[1], member)
  redis.call('ZREM', order_of(owner), id)
  if tonumber(redis.call('ZINCRBY', KEYS[3], -size, owner)) <= 0 then
    redis.call('ZREM', KEYS[3], owner)
  end
end

local operations = {}

-- Stores a response, and drops others until the bounds hold: those that expired, then, of the owner with the most bytes,
-- those that were not used for the longest time. So no owner displaces the few responses of others. `kept_ms`: how long
-- a response is kept after its last use.
function operations.put(owner, id, response, size, most_bytes, most_responses, kept_ms)
  drop(owner, id)
  redis.call('SET', value_of(owner, id), response, 'PX', kept_ms)
  redis.call('HSET', KEYS[2], owner .. ' ' .. id, size)
  redis.call('HINCRBY', KEYS[2], '', size)
  redis.call('ZINCRBY', KEYS[3], size, owner)
  note_use(owner, id)

  local expiry = as_text(now - tonumber(kept_ms) * 1000)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', expiry, 'LIMIT', 0, 100)) do
    local of, expired = string.match(member, '^(%S*) (.*)$')
    drop(of, expired)
  end
  most_bytes, most_responses = tonumber(most_bytes), tonumber(most_responses)
  while tonumber(redis.call('HGET', KEYS[2], '')) > most_bytes or redis.call('HLEN', KEYS[2]) - 1 > most_responses do
    local largest = redis.call('ZREVRANGE', KEYS[3], 0, 0)[1]
    local oldest = largest and redis.call('ZRANGE', order_of(largest), 0, 0)[1]
    if not oldest then -- another program changed the keys
      redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
      break
    end
    drop(largest, oldest)
  end
end

-- Returns a response, or false. It then counts as used.
function operations.get(owner, id, kept_ms)
  local response = redis.call('GET', value_of(owner, id))
  if response then
    redis.call('PEXPIRE', value_of(owner, id), kept_ms)
    note_use(owner, id)
  else
    drop(owner, id)
  end
  return response
end

-- Drops a response. Returns 1 if it was there, else 0.
function operations.delete(owner, id)
  local existed = redis.call('EXISTS', value_of(owner, id))
  drop(owner, id)
  return existed
end

return operations[ARGV[1]](unpack(ARGV, 2))
