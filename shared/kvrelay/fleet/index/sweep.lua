-- Clears the bits of retired slots, one piece of the index a call; a slot can be given out again after a whole pass.
--
-- KEYS[1]  base
-- ARGV     the sweeper's name, time in ms for which it keeps others out, blocks to look at
-- returns  the number of retired slots that are left; -1 while another sweeper is at it
--
-- Bits carry no generation, so a pass clears those of all slots that were retired when it began: what it costs depends
-- on the size of the index, not on the number of slots.
local base, me, budget = KEYS[1], ARGV[1], tonumber(ARGV[3])
local sweeper = redis.call('GET', base .. ':sweeper')
if sweeper and sweeper ~= me then
  return -1
end
redis.call('SET', base .. ':sweeper', me, 'PX', ARGV[2])

local pass = base .. ':pass' -- hash: "cursor", and the slots of this pass, each with its range id
local cursor = tonumber(redis.call('HGET', pass, 'cursor') or -1)
if cursor < 0 then
  local retired = redis.call('HGETALL', base .. ':retired')
  if #retired == 0 then
    redis.call('DEL', base .. ':sweeper')
    return 0
  end
  redis.call('HSET', pass, 'cursor', 0, unpack(retired))
  cursor = 0
end

local doomed, of_octet = {}, {}
local fields = redis.call('HKEYS', pass)
for _, name in ipairs(fields) do
  if name ~= 'cursor' then
    doomed[#doomed + 1] = name
    local octet = math.floor(name / 8)
    of_octet[octet] = bit.bor(of_octet[octet] or 0, 2 ^ (name % 8))
  end
end

local byte, char, sub = string.byte, string.char, string.sub
local function cleared(value)
  local offset, changed = byte(value, 1), false
  local window = { byte(value, 2, -1) }
  for i = 1, #window do
    local mask = of_octet[offset + i - 1]
    if mask and bit.band(window[i], mask) ~= 0 then
      window[i] = bit.band(window[i], bit.bnot(mask))
      changed = true
    end
  end
  if not changed then
    return value
  end
  local first, last = 1, #window
  while first <= last and window[first] == 0 do
    first = first + 1
  end
  while last >= first and window[last] == 0 do
    last = last - 1
  end
  if first > last then
    return ''
  end
  return char(offset + first - 1, unpack(window, first, last))
end

while cursor < 65536 and budget > 0 do
  local bucket = base .. ':b:' .. char(math.floor(cursor / 256), cursor % 256)
  local entries = redis.call('HGETALL', bucket)
  for i = 1, #entries, 2 do
    local value = cleared(entries[i + 1])
    if value == '' then
      redis.call('HDEL', bucket, entries[i])
    elseif value ~= entries[i + 1] then
      redis.call('HSET', bucket, entries[i], value)
    end
  end
  budget = budget - #entries / 2 - 0.5
  cursor = cursor + 1
end

if cursor < 65536 then
  redis.call('HSET', pass, 'cursor', cursor)
else
  redis.call('DEL', pass)
  redis.call('HDEL', base .. ':retired', unpack(doomed))
  redis.call('DEL', base .. ':sweeper')
end
return redis.call('HLEN', base .. ':retired')
