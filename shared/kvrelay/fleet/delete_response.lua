-- Drops a response. Returns 1 if it was there, else 0.
--
-- ARGV     owner, id
local existed = redis.call('EXISTS', value_of(ARGV[1], ARGV[2]))
drop(ARGV[1], ARGV[2])
return existed
