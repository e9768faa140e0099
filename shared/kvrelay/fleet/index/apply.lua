-- Applies the next batch of a range's events, or, with an empty batch, renews its lease.
--
-- KEYS[1]  base
-- ARGV     slot, range id, sequence number, ttl in ms, operations, the batch as the stream carries it
--          operations: runs of '+' or '-', their number as 2 bytes (big endian), and so many hashes of 16 bytes
-- returns  "OK"    applied, now or before
--          "GAP"   batches before this one are missing: replace the range
--          "LOST"  the slot is not this range id's (any more): open another
--          "SWEEP" as OK, and retired ranges wait for sweep.lua (told at renewals only)
--
-- A block's value is the bitmap of the slots that hold it, without the zero bytes at its ends, behind one byte that
-- counts those left out in front. So equal sets are equal strings, and a block that one worker holds takes two bytes.
local base, slot, range_id, seq, operations = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[5]
local holder = redis.call('HGET', base .. ':slots', slot)
if not holder or string.match(holder, '^%S+') ~= range_id then
  return 'LOST'
end
local known = tonumber(redis.call('HGET', base .. ':seqs', slot) or 0)
local is_next = known == seq - 1 and operations ~= ''
if known ~= seq and not is_next then
  return 'GAP'
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', base .. ':leases', string.format('%d', now + tonumber(ARGV[4])), slot)

if operations == '' then
  for _, late in ipairs(redis.call('ZRANGEBYSCORE', base .. ':leases', '-inf', string.format('%d', now), 'LIMIT', 0, 16)) do
    local its_range_id = string.match(redis.call('HGET', base .. ':slots', late) or '', '^%S+')
    redis.call('HDEL', base .. ':slots', late)
    redis.call('HDEL', base .. ':seqs', late)
    redis.call('ZREM', base .. ':leases', late)
    if its_range_id then
      redis.call('HSET', base .. ':retired', late, its_range_id)
      redis.call('XADD', base .. ':stream', '*', 'e', cmsgpack.pack({ 'r', tonumber(late), its_range_id }))
    end
  end
  local last = redis.call('XREVRANGE', base .. ':stream', '+', '-', 'COUNT', 1)[1]
  if last and tonumber(string.match(last[1], '^%d+')) > now + 30000 then
    -- The clock was set back. Until it is as late again, all entries get the millisecond of the last one.
    redis.call('XTRIM', base .. ':stream', 'MAXLEN', '~', 10000)
  else
    redis.call('XTRIM', base .. ':stream', 'MINID', '~', string.format('%d', now - 30000))
  end
  return redis.call('EXISTS', base .. ':retired') == 1 and 'SWEEP' or 'OK'
end
if not is_next then
  return 'OK'
end

local byte, char, sub, rep, match = string.byte, string.char, string.sub, string.rep, string.match
local call = redis.call
local blocks = base .. ':b:'
local octet, mask = math.floor(slot / 8), 2 ^ (slot % 8)
local own_bit = char(mask)
local alone = char(octet) .. own_bit

local function with(value)
  local at = octet - byte(value, 1)
  if at < 0 then
    return alone .. rep('\0', -at - 1) .. sub(value, 2)
  elseif at >= #value - 1 then
    return value .. rep('\0', at - #value + 1) .. own_bit
  end
  return sub(value, 1, at + 1) .. char(bit.bor(byte(value, at + 2), mask)) .. sub(value, at + 3)
end

local function without(value)
  local offset = byte(value, 1)
  local at = octet - offset
  if at < 0 or at >= #value - 1 then
    return value
  end
  local rest = bit.band(byte(value, at + 2), 255 - mask)
  local window = sub(value, 2, at + 1) .. char(rest) .. sub(value, at + 3)
  local first, last = 1, #window
  while first <= last and byte(window, first) == 0 do
    first = first + 1
  end
  while last >= first and byte(window, last) == 0 do
    last = last - 1
  end
  if first > last then
    return ''
  end
  return char(offset + first - 1) .. sub(window, first, last)
end

local position = 1
while position < #operations do
  local is_stored = byte(operations, position) == 43
  local count = byte(operations, position + 1) * 256 + byte(operations, position + 2)
  position = position + 3
  for start = position, position + 16 * (count - 1), 16 do
    local bucket, field = blocks .. sub(operations, start, start + 1), sub(operations, start + 2, start + 15)
    if is_stored then
      if call('HSETNX', bucket, field, alone) == 0 then
        call('HSET', bucket, field, with(call('HGET', bucket, field)))
      end
    else
      local value = call('HGET', bucket, field)
      if value == alone then
        call('HDEL', bucket, field)
      elseif value then
        local rest = without(value)
        if rest == '' then
          call('HDEL', bucket, field)
        elseif rest ~= value then
          call('HSET', bucket, field, rest)
        end
      end
    end
  end
  position = position + 16 * count
end
redis.call('HSET', base .. ':seqs', slot, seq)
redis.call('XADD', base .. ':stream', 'MINID', '~', string.format('%d', now - 30000), '*', 'e', ARGV[6])
return 'OK'
