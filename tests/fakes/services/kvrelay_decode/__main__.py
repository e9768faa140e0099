from tests.fakes.service_process import run_worker

run_worker("decode")
