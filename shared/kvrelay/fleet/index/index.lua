-- The operations of the prefix index; ARGV[1] names one.
--
-- KEYS[1]  base: all keys of the index are derived from it and lie in its hash slot
--   slots    slot -> "<range id> <worker id>", a range id is "<incarnation>:<generation>"
--   seqs     slot -> sequence number of its last batch
--   leases   slots by the expiry of their leases in ms
--   retired  slot -> range id, of ranges whose bits are still to be cleared
--   stream   the events for the replicas
--   b:XX     14 bytes of a block's hash -> the slots that hold it, of hashes that begin with the bytes XX
--
-- A block's value is the bitmap of the slots that hold it, without the zero bytes at its ends, behind one byte that
-- counts those left out in front. So equal sets are equal strings, and a block that one worker holds takes two bytes.
local base = KEYS[1]
local call = redis.call
local byte, char, sub, rep, match = string.byte, string.char, string.sub, string.rep, string.match
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- The longest lease that a worker may ask for (`peer_timeout_s`). A later expiry is from before the clock was set back.
local longest = 600000
local num_buckets = 65536

local function as_text(ms) -- Lua's own has 14 digits
  return string.format('%d', ms)
end

local function publish(packed)
  call('XADD', base .. ':stream', 'MINID', '~', as_text(now - 30000), '*', 'e', packed)
end

local function retire(slot, range_id)
  call('HDEL', base .. ':slots', slot)
  call('HDEL', base .. ':seqs', slot)
  call('ZREM', base .. ':leases', slot)
  if range_id then
    call('HSET', base .. ':retired', slot, range_id)
    publish(cmsgpack.pack({ 'r', tonumber(slot), range_id }))
  end
end

-- The value for a bitmap that begins at the byte `offset`; "" if it is empty.
local function packed_bitmap(offset, window)
  local first, last = 1, #window
  while first <= last and byte(window, first) == 0 do
    first = first + 1
  end
  while last >= first and byte(window, last) == 0 do
    last = last - 1
  end
  return first > last and '' or char(offset + first - 1) .. sub(window, first, last)
end

local function bucket_of(cursor)
  return char(math.floor(cursor / 256), cursor % 256)
end

local operations = {}

-- Gives a worker a fresh slot for its range of blocks; its older ranges retire. Returns the slot; -1 when none is free;
-- -2 when a later incarnation of this worker has one, with a valid lease. Asking again with the same range id gives the
-- same slot, so a lost answer does no harm.
function operations.open(worker, incarnation, range_id, ttl, num_slots)
  local expiry = as_text(now + tonumber(ttl))
  local taken, earlier = {}, {}
  local slots = call('HGETALL', base .. ':slots')
  for i = 1, #slots, 2 do
    taken[slots[i]] = true
    local its_range_id, its_incarnation, owner = match(slots[i + 1], '^((%S+):%S+) (.*)$')
    if its_range_id == range_id then
      call('ZADD', base .. ':leases', expiry, slots[i])
      return tonumber(slots[i])
    elseif owner == worker then
      local lease = tonumber(call('ZSCORE', base .. ':leases', slots[i]) or 0)
      if its_incarnation > incarnation and lease > now and lease <= now + longest then
        return -2
      end
      earlier[#earlier + 1] = { slots[i], its_range_id }
    end
  end

  call('SETNX', base .. ':epoch', range_id .. '@' .. as_text(now))
  for _, range in ipairs(earlier) do
    retire(range[1], range[2])
  end
  for _, slot in ipairs(call('HKEYS', base .. ':retired')) do
    taken[slot] = true
  end
  for slot = 0, tonumber(num_slots) - 1 do
    local name = tostring(slot)
    if not taken[name] then
      call('HSET', base .. ':slots', name, range_id .. ' ' .. worker)
      call('HSET', base .. ':seqs', name, 0)
      call('ZADD', base .. ':leases', expiry, name)
      publish(cmsgpack.pack({ 'o', slot, range_id, worker }))
      return slot
    end
  end
  return -1
end

-- Retires a range whose worker leaves: its blocks are swept later. Returns 1 when the range was still there, else 0.
function operations.close(slot, range_id)
  local holder = call('HGET', base .. ':slots', slot)
  if not holder or match(holder, '^%S+') ~= range_id then
    return 0
  end
  retire(slot, range_id)
  return 1
end

-- Retires the ranges whose leases have expired, and trims the stream.
local function expire()
  for _, late in ipairs(call('ZRANGEBYSCORE', base .. ':leases', '-inf', as_text(now), 'LIMIT', 0, 16)) do
    retire(late, match(call('HGET', base .. ':slots', late) or '', '^%S+'))
  end
  local last = call('XREVRANGE', base .. ':stream', '+', '-', 'COUNT', 1)[1]
  if last and tonumber(match(last[1], '^%d+')) > now + 30000 then
    -- The clock was set back. Until it is as late again, all entries get the millisecond of the last one.
    call('XTRIM', base .. ':stream', 'MAXLEN', '~', 10000)
  else
    call('XTRIM', base .. ':stream', 'MINID', '~', as_text(now - 30000))
  end
end

-- Applies the next batch of a range's events, or, with an empty batch, renews its lease.
--
-- operations  runs of '+' or '-', their number as 2 bytes (big endian), and so many hashes of 16 bytes
-- event       the batch as the stream carries it
-- returns     "OK"    applied, now or before
--             "GAP"   batches before this one are missing: replace the range
--             "LOST"  the slot is not this range id's (any more): open another
--             "SWEEP" as OK, and retired ranges wait for a sweep (reported at renewals only)
function operations.apply(slot, range_id, seq, ttl, operations, event)
  seq = tonumber(seq)
  local holder = call('HGET', base .. ':slots', slot)
  if not holder or match(holder, '^%S+') ~= range_id then
    return 'LOST'
  end
  local known = tonumber(call('HGET', base .. ':seqs', slot) or 0)
  local is_next = known == seq - 1 and operations ~= ''
  if known ~= seq and not is_next then
    return 'GAP'
  end
  call('ZADD', base .. ':leases', as_text(now + tonumber(ttl)), slot)
  if operations == '' then
    expire()
    return call('EXISTS', base .. ':retired') == 1 and 'SWEEP' or 'OK'
  end
  if not is_next then
    return 'OK'
  end

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
    return packed_bitmap(offset, window)
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
  call('HSET', base .. ':seqs', slot, seq)
  publish(event)
  return 'OK'
end

-- Clears the bits of retired slots, one piece of the index a call; a slot can be given out again after a whole pass.
-- Returns the number of retired slots that are left; -1 while another sweeper, which `keep_out_ms` keeps out, is at it.
--
-- Bits carry no generation, so a pass clears those of all slots that were retired when it began: what it costs depends
-- on the size of the index, not on the number of slots.
function operations.sweep(me, keep_out_ms, budget)
  budget = tonumber(budget)
  local sweeper = call('GET', base .. ':sweeper')
  if sweeper and sweeper ~= me then
    return -1
  end
  call('SET', base .. ':sweeper', me, 'PX', keep_out_ms)

  local pass = base .. ':pass' -- hash: "cursor", and the slots of this pass, each with its range id
  local cursor = tonumber(call('HGET', pass, 'cursor') or -1)
  if cursor < 0 then
    local retired = call('HGETALL', base .. ':retired')
    if #retired == 0 then
      call('DEL', base .. ':sweeper')
      return 0
    end
    call('HSET', pass, 'cursor', 0, unpack(retired))
    cursor = 0
  end

  local doomed, of_octet = {}, {}
  local fields = call('HKEYS', pass)
  for _, name in ipairs(fields) do
    if name ~= 'cursor' then
      doomed[#doomed + 1] = name
      local octet = math.floor(name / 8)
      of_octet[octet] = bit.bor(of_octet[octet] or 0, 2 ^ (name % 8))
    end
  end

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
    return changed and packed_bitmap(offset, char(unpack(window))) or value
  end

  while cursor < num_buckets and budget > 0 do
    local bucket = base .. ':b:' .. bucket_of(cursor)
    local entries = call('HGETALL', bucket)
    for i = 1, #entries, 2 do
      local value = cleared(entries[i + 1])
      if value == '' then
        call('HDEL', bucket, entries[i])
      elseif value ~= entries[i + 1] then
        call('HSET', bucket, entries[i], value)
      end
    end
    budget = budget - #entries / 2 - 0.5
    cursor = cursor + 1
  end

  if cursor < num_buckets then
    call('HSET', pass, 'cursor', cursor)
  else
    call('DEL', pass)
    call('HDEL', base .. ':retired', unpack(doomed))
    call('DEL', base .. ':sweeper')
  end
  return call('HLEN', base .. ':retired')
end

-- All ranges, and where the stream stands: what a replica begins with, and is held against. Returns the epoch ("" in an
-- index that was never used), the stream's last id, the number of retired slots, and a list: slot, "<range id> <worker
-- id>", sequence number, slot, ...
function operations.slots()
  local last_id = '0-0'
  if call('EXISTS', base .. ':stream') == 1 then
    local info = call('XINFO', 'STREAM', base .. ':stream')
    for i = 1, #info, 2 do
      if info[i] == 'last-generated-id' then
        last_id = info[i + 1]
      end
    end
  end
  local ranges = {}
  local slots = call('HGETALL', base .. ':slots')
  for i = 1, #slots, 2 do
    ranges[#ranges + 1] = slots[i]
    ranges[#ranges + 1] = slots[i + 1]
    ranges[#ranges + 1] = call('HGET', base .. ':seqs', slots[i]) or '0'
  end
  return { call('GET', base .. ':epoch') or '', last_id, call('HLEN', base .. ':retired'), ranges }
end

-- A piece of the index: the blocks of the buckets from `cursor` on, about `budget`, with their holders. Returns the
-- bucket to go on with (65536: none), and the blocks: hash, length of the value (1 byte), value, ...
function operations.snapshot(cursor, budget)
  cursor, budget = tonumber(cursor), tonumber(budget)
  local parts = {}
  while cursor < num_buckets and budget > 0 do
    local bucket = bucket_of(cursor)
    local entries = call('HGETALL', base .. ':b:' .. bucket)
    for i = 1, #entries, 2 do
      parts[#parts + 1] = bucket
      parts[#parts + 1] = entries[i]
      parts[#parts + 1] = char(#entries[i + 1])
      parts[#parts + 1] = entries[i + 1]
    end
    budget = budget - #entries / 2 - 0.2
    cursor = cursor + 1
  end
  return { cursor, table.concat(parts) }
end

return operations[ARGV[1]](unpack(ARGV, 2))
