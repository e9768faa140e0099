-- Responses that all routers share, by owner and id. The scripts *_response.lua begin with this text.
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
