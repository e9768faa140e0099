-- A piece of the index: the blocks of the next buckets, with their holders.
--
-- KEYS[1]  base
-- ARGV     first bucket, blocks to read
-- returns  the bucket to go on with (65536: none), and the blocks: hash, length of the value (1 byte), value, ...
local base, cursor, budget = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2])
local parts = {}
while cursor < 65536 and budget > 0 do
  local bucket = string.char(math.floor(cursor / 256), cursor % 256)
  local entries = redis.call('HGETALL', base .. ':b:' .. bucket)
  for i = 1, #entries, 2 do
    parts[#parts + 1] = bucket
    parts[#parts + 1] = entries[i]
    parts[#parts + 1] = string.char(#entries[i + 1])
    parts[#parts + 1] = entries[i + 1]
  end
  budget = budget - #entries / 2 - 0.2
  cursor = cursor + 1
end
return { cursor, table.concat(parts) }
