-- The operations of the registry; ARGV[1] names one. A lease is of a slot, and the record that it lists is of a worker.
--
-- KEYS[1]  leases: slot -> "<expiry in ms> <incarnation> <worker id>"
-- KEYS[2]  records: slot -> msgpack
-- KEYS[3]  drains: worker id -> incarnation
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- The longest lease that a worker may ask for (`peer_timeout_s`). A later expiry is from before the clock was set back.
local longest = 600000

local function leases()
  local found, entries = {}, redis.call('HGETALL', KEYS[1])
  for i = 1, #entries, 2 do
    local expiry, holder, worker = string.match(entries[i + 1], '^(%d+) (%S+) (.*)$')
    local is_held = tonumber(expiry) > now and tonumber(expiry) <= now + longest
    found[#found + 1] = { slot = entries[i], expiry = expiry, holder = holder, worker = worker, is_held = is_held }
  end
  return found
end

local function hold(slot, incarnation, worker, ttl)
  local expiry = string.format('%d', now + tonumber(ttl))
  redis.call('HSET', KEYS[1], slot, expiry .. ' ' .. incarnation .. ' ' .. worker)
end

local function release(slot)
  redis.call('HDEL', KEYS[1], slot)
  redis.call('HDEL', KEYS[2], slot)
end

local operations = {}

-- Takes the smallest free slot for a worker, which is listed from its first renewal on. Returns {slot}, {-1} if all are
-- taken, or {-2, incarnation, expiry in ms, record} if another incarnation of this worker holds a slot.
--
-- The lease of `ended`, an incarnation of this worker that has ended, is removed here, so that a worker is never listed
-- twice.
function operations.join(worker, incarnation, ttl, num_slots, ended)
  local taken = {}
  for _, lease in ipairs(leases()) do
    local is_own = lease.worker == worker and (lease.holder == incarnation or lease.holder == ended)
    if not lease.is_held or is_own then
      release(lease.slot)
    elseif lease.worker == worker then
      return { -2, lease.holder, lease.expiry, redis.call('HGET', KEYS[2], lease.slot) or '' }
    else
      taken[lease.slot] = true
    end
  end
  for slot = 0, tonumber(num_slots) - 1 do
    if not taken[tostring(slot)] then
      hold(tostring(slot), incarnation, worker, ttl)
      return { slot }
    end
  end
  return { -1 }
end

-- Extends a lease and replaces the record; takes the slot again if Redis has lost it. Returns "" when renewed, else the
-- incarnation that holds the slot, or that is a later start of this worker.
function operations.renew(worker, incarnation, record, ttl, slot)
  for _, lease in ipairs(leases()) do
    local is_same = lease.slot == slot or lease.worker == worker
    if lease.holder ~= incarnation and lease.is_held and is_same then
      return lease.holder
    end
  end
  hold(slot, incarnation, worker, ttl)
  redis.call('HSET', KEYS[2], slot, record)
  return ''
end

-- Gives a slot back. Returns 1 if this incarnation still held it, else 0.
function operations.leave(incarnation, slot)
  local lease = redis.call('HGET', KEYS[1], slot)
  if not lease or string.match(lease, '^%d+ (%S+)') ~= incarnation then
    return 0
  end
  release(slot)
  return 1
end

-- Returns the records of all workers whose lease holds, in no order, each followed by "1" if it shall drain.
function operations.list()
  local records = {}
  for _, lease in ipairs(leases()) do
    local record = lease.is_held and redis.call('HGET', KEYS[2], lease.slot)
    if record then
      records[#records + 1] = record
      records[#records + 1] = redis.call('HGET', KEYS[3], lease.worker) == lease.holder and '1' or ''
    end
  end
  return records
end

-- Marks a worker as draining for all routers ("1"), or takes the mark back ("0"). It holds for this incarnation alone.
-- Returns the worker's incarnation, or "" if no lease of such a worker holds.
function operations.drain(worker, mark)
  local found, alive = '', {}
  for _, lease in ipairs(leases()) do
    if lease.is_held then
      alive[lease.worker] = true
      found = lease.worker == worker and lease.holder or found
    end
  end
  for _, marked in ipairs(redis.call('HKEYS', KEYS[3])) do
    if not alive[marked] then
      redis.call('HDEL', KEYS[3], marked)
    end
  end
  if found ~= '' and mark == '1' then
    redis.call('HSET', KEYS[3], worker, found)
  elseif found ~= '' then
    redis.call('HDEL', KEYS[3], worker)
  end
  return found
end

return operations[ARGV[1]](unpack(ARGV, 2))
