-- Gives a worker a fresh slot for its range of blocks; whatever older range it had retires.
--
-- KEYS[1]  base; all keys of the index are derived from it and lie in its hash slot
-- ARGV     worker id, incarnation, range id ("<incarnation>:<generation>"), ttl in ms, number of slots
-- returns  the slot; -1 when none is free; -2 when a later start of this worker has one, with a valid lease
--
-- Asking again with the same range id gives the same slot, so a lost answer does no harm.
local base, worker, incarnation, range_id = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local expiry = string.format('%d', now + tonumber(ARGV[4]))
-- The longest lease that a worker may ask for (`peer_timeout_s`). A later expiry is from before the clock was set back.
local longest = 600000

local function is_held(slot)
  local lease = tonumber(redis.call('ZSCORE', base .. ':leases', slot) or 0)
  return lease > now and lease <= now + longest
end

local function tell(event)
  redis.call('XADD', base .. ':stream', 'MINID', '~', string.format('%d', now - 30000), '*', 'e', cmsgpack.pack(event))
end

local taken, earlier = {}, {}
local slots = redis.call('HGETALL', base .. ':slots')
for i = 1, #slots, 2 do
  taken[slots[i]] = true
  local its_range_id, its_incarnation, owner = string.match(slots[i + 1], '^((%S+):%S+) (.*)$')
  if its_range_id == range_id then
    redis.call('ZADD', base .. ':leases', expiry, slots[i])
    return tonumber(slots[i])
  elseif owner == worker then
    if its_incarnation > incarnation and is_held(slots[i]) then
      return -2
    end
    earlier[#earlier + 1] = { slots[i], its_range_id }
  end
end

redis.call('SETNX', base .. ':epoch', range_id .. '@' .. string.format('%d', now))
for _, range in ipairs(earlier) do
  redis.call('HDEL', base .. ':slots', range[1])
  redis.call('HDEL', base .. ':seqs', range[1])
  redis.call('ZREM', base .. ':leases', range[1])
  redis.call('HSET', base .. ':retired', range[1], range[2])
  tell({ 'r', tonumber(range[1]), range[2] })
end

local retired = redis.call('HKEYS', base .. ':retired')
for _, slot in ipairs(retired) do
  taken[slot] = true
end
for slot = 0, tonumber(ARGV[5]) - 1 do
  local name = tostring(slot)
  if not taken[name] then
    redis.call('HSET', base .. ':slots', name, range_id .. ' ' .. worker)
    redis.call('HSET', base .. ':seqs', name, 0)
    redis.call('ZADD', base .. ':leases', expiry, name)
    tell({ 'o', slot, range_id, worker })
    return slot
  end
end
return -1
