-- How many leading blocks of a chain each worker holds, in one round trip.
--
-- KEYS[1]  base
-- ARGV     the chain: hashes of 16 bytes, one behind the other
-- returns  worker id, number of blocks, worker id, number of blocks, ...
--
-- Each worker's blocks are closed under prefixes, so the set of holders only shrinks along the chain. The script gallops
-- to where it is empty, then bisects every stretch at whose ends the sets differ: O(log n) reads for each place where
-- some worker's prefix ends.
local blocks, chain = KEYS[1] .. ':b:', ARGV[1]
local num_hashes = #chain / 16
local sub, byte, call = string.sub, string.byte, redis.call

local function holders(i)
  local start = 16 * i
  return call('HGET', blocks .. sub(chain, start + 1, start + 2), sub(chain, start + 3, start + 16)) or ''
end

local ends = {} -- slot -> number of blocks
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

if num_hashes == 0 then
  return {}
end
local at, set, step = 0, holders(0), 1
while set ~= '' and at < num_hashes - 1 do
  local next_at = math.min(at + step, num_hashes - 1)
  local next_set = holders(next_at)
  narrow(at, next_at, set, next_set)
  at, set, step = next_at, next_set, step * 2
end
if set ~= '' then
  note(set, '', num_hashes)
end

local slots = {}
for slot in pairs(ends) do
  slots[#slots + 1] = slot
end
if #slots == 0 then
  return {}
end
local answer = {}
for i, holder in ipairs(call('HMGET', KEYS[1] .. ':slots', unpack(slots))) do
  if holder then -- else it is retired
    answer[#answer + 1] = string.match(holder, '^%S+ (.*)$')
    answer[#answer + 1] = ends[slots[i]]
  end
end
return answer
