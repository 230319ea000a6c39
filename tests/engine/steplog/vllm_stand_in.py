"""A stand-in for vLLM's scheduler: its calls and fields, with our kernel deciding behind them."""

import hashlib
from itertools import count
from types import SimpleNamespace

from engine.core import KernelConfig, Prompt, Request, Scheduler

_MOMENTS = count(1.0)


class StandInRequest:
    """What the recorder reads of a vLLM request."""

    def __init__(self, name, prompt, max_tokens, size, stop=None, priority=0):
        self.request_id, self.prompt, self.max_tokens = name, list(prompt), max_tokens
        self.num_prompt_tokens, self.size, self.stop = len(self.prompt), size, stop
        self.arrival_time, self.priority = next(_MOMENTS), priority
        self.output_token_ids = []
        self.num_computed_tokens = 0
        self.status = SimpleNamespace(name="RUNNING")

    @property
    def num_output_tokens(self):
        return len(self.output_token_ids)

    @property
    def block_hashes(self):
        tokens, found, digest = self.prompt + self.output_token_ids, [], b""
        for end in range(self.size, len(tokens) + 1, self.size):
            block = repr(tokens[end - self.size : end]).encode()
            digest = hashlib.sha256(digest + block).digest()
            found.append(digest)
        return found


class StandInScheduler:
    """`schedule`, `update_from_output`, `add_request`, `finish_requests`, `shutdown`."""

    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        options, cache = vllm_config.scheduler_config, vllm_config.cache_config
        self.max_model_len = vllm_config.max_model_len
        self.kernel = Scheduler(
            KernelConfig(
                num_blocks=cache.num_gpu_blocks - 1,
                max_model_len=self.max_model_len,
                block_size=cache.block_size,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                policy=options.policy if options.policy == "priority" else "mixed",
                async_scheduling=options.async_scheduling,
            )
        )
        pool = SimpleNamespace(
            num_gpu_blocks=cache.num_gpu_blocks,
            get_num_free_blocks=lambda: self.kernel.num_free_blocks,
        )
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)
        self.requests, self.finished_req_ids, self.closed = {}, set(), False

    @property
    def running(self):
        return self.kernel.running_ids()

    @property
    def waiting(self):
        return self.kernel.waiting_ids()

    def add_request(self, request):
        stops = frozenset() if request.stop is None else frozenset({request.stop})
        prompt = Prompt(request.prompt)
        self.kernel.add(
            Request(
                request.request_id, prompt, request.max_tokens, stops, priority=request.priority
            )
        )
        self.requests[request.request_id] = request

    def schedule(self):
        self.finished_req_ids = set()
        if not self.kernel.has_work:
            return SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=set(), plan=None)
        plan = self.kernel.schedule()
        tokens = {}
        for entry in plan.entries:
            tokens[entry.request_id] = entry.num_tokens
            self.requests[entry.request_id].num_computed_tokens = (
                entry.first_position + entry.num_tokens
            )
        return SimpleNamespace(
            num_scheduled_tokens=tokens, preempted_req_ids=set(plan.preempted), plan=plan
        )

    def update_from_output(self, output, tokens):
        if output.plan is None:
            return
        outcome = self.kernel.commit(output.plan, tokens)
        for name, token in zip(outcome.sampled, outcome.token_ids, strict=True):
            self.requests[name].output_token_ids.append(token)
        for ended in outcome.finished:
            status = "FINISHED_STOPPED" if ended.reason == "stop" else "FINISHED_LENGTH_CAPPED"
            self.requests.pop(ended.request_id).status = SimpleNamespace(name=status)
            self.finished_req_ids.add(ended.request_id)

    def finish_requests(self, names, status):
        for name in [names] if isinstance(names, str) else names:
            self.kernel.abort(name)
            self.requests.pop(name)

    def shutdown(self):
        self.closed = True


def vllm_config(is_async=False, num_blocks=200, policy="fcfs"):
    """The fields of a VllmConfig that the recorder reads."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(
            async_scheduling=is_async, max_num_seqs=8, max_num_batched_tokens=32, policy=policy
        ),
        cache_config=SimpleNamespace(
            block_size=4, enable_prefix_caching=True, num_gpu_blocks=num_blocks
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=SimpleNamespace(model="tiny", dtype="torch.bfloat16"),
        max_model_len=128,
    )


def serve(scheduler, requests, *, is_async, token_of):
    """Runs requests (a list per step) as vLLM's engine core does; tokens come from `token_of`."""
    queue, step = [], 0
    while step < len(requests) or scheduler.kernel.has_work or queue:
        for request in requests[step] if step < len(requests) else ():
            scheduler.add_request(request)
        if scheduler.kernel.has_work:
            queue.append(scheduler.schedule())
        if queue and (len(queue) > is_async or not scheduler.kernel.has_work):
            output = queue.pop(0)
            sampled = output.plan.sampled_ids if output.plan else ()
            scheduler.update_from_output(output, [token_of(name) for name in sampled])
        step += 1
