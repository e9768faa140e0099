from tests.fakes.service_process import run_router

run_router()
