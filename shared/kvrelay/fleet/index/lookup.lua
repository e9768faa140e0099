-- How many leading blocks of each chain each worker holds, in one round trip.
--
-- KEYS[1]  base
-- ARGV     blocks to read at most, then the chains: each its hashes of 16 bytes, one behind the other
-- returns  a list for each chain: worker id, number of blocks, worker id, number of blocks, ...
--          Fewer lists than chains where the first ones took all reads: ask again for the rest. One is always answered.
--
-- Each worker's blocks are closed under prefixes, so the set of holders only shrinks along the chain. A chain that is
-- held alike at both ends is held alike throughout. Else the script gallops to where the set is empty, then bisects
-- every stretch at whose ends the sets differ: O(log n) reads for each place where some worker's prefix ends.
local blocks, slots = KEYS[1] .. ':b:', KEYS[1] .. ':slots'
local sub, byte, match, call = string.sub, string.byte, string.match, redis.call

local chain, num_reads = '', 0
local function holders(i)
  local start = 16 * i
  num_reads = num_reads + 1
  return call('HGET', blocks .. sub(chain, start + 1, start + 2), sub(chain, start + 3, start + 16)) or ''
end

local ends -- slot -> number of blocks
local function note(set, less, num_blocks)
  local offset, less_offset = byte(set, 1), byte(less, 1) or 0
  for at = 2, #set do
    local octet = offset + at - 2
    local bits = bit.band(byte(set, at), bit.bnot(byte(less, octet - less_offset + 2) or 0))
    if octet < less_offset then
      bits = byte(set, at)
    end
    for i = 0, 7 do
      if bit.band(bits, 2 ^ i) ~= 0 then
        ends[8 * octet + i] = num_blocks
      end
    end
  end
end

local function narrow(low, high, at_low, at_high)
  while at_low ~= at_high and high - low > 1 do
    local middle = math.floor((low + high) / 2)
    local at_middle = holders(middle)
    if at_middle == at_low then
      low = middle
    elseif at_middle == at_high then
      high = middle
    else
      narrow(low, middle, at_low, at_middle)
      low, at_low = middle, at_middle
    end
  end
  if at_low ~= at_high then
    note(at_low, at_high, low + 1)
  end
end

local function walk()
  local last = #chain / 16 - 1
  local set = last >= 0 and holders(0) or ''
  if set == '' then
    return
  end
  local at_last = last > 0 and holders(last) or set
  if at_last ~= '' then
    narrow(0, last, set, at_last)
    return note(at_last, '', last + 1)
  end
  local at, step = 0, 1
  while set ~= '' do
    local next_at, next_set = at + step, ''
    if next_at < last then
      next_set = holders(next_at)
    else
      next_at = last
    end
    narrow(at, next_at, set, next_set)
    at, set, step = next_at, next_set, step * 2
  end
end

local names = {} -- slot -> worker id, or '' of a retired one
local function named()
  local unknown = {}
  for slot in pairs(ends) do
    if not names[slot] then
      unknown[#unknown + 1] = slot
    end
  end
  if #unknown > 0 then
    for i, holder in ipairs(call('HMGET', slots, unpack(unknown))) do
      names[unknown[i]] = holder and match(holder, '^%S+ (.*)$') or ''
    end
  end
  local answer = {}
  for slot, num_blocks in pairs(ends) do
    if names[slot] ~= '' then
      answer[#answer + 1] = names[slot]
      answer[#answer + 1] = num_blocks
    end
  end
  return answer
end

local answers, most_reads = {}, tonumber(ARGV[1])
for number = 2, #ARGV do
  chain, ends = ARGV[number], {}
  walk()
  answers[#answers + 1] = named()
  if num_reads >= most_reads then
    break
  end
end
return answers
