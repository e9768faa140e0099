-- Returns a response, or false. It then counts as used.
--
-- ARGV     owner, id, ms that a response is kept after its last use
local owner, id, kept_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])

local response = redis.call('GET', value_of(owner, id))
if response then
  redis.call('PEXPIRE', value_of(owner, id), kept_ms)
  note_use(owner, id)
else
  drop(owner, id)
end
return response
