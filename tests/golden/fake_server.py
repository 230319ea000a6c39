"""A small server with `/v1/completions` over an engine, which can behave in every bad way."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from engine.llm import LLM
from engine.sampling_params import SamplingParams

MODEL = "tiny"


class Server:
    """Answers of an engine in the shape of vLLM; `breakage` may replace them."""

    def __init__(self, llm, has_prompt_logprobs=True, has_logprobs=True, names_ids=True):
        self.llm, self.lock = llm, threading.Lock()
        self.has_prompt_logprobs, self.has_logprobs = has_prompt_logprobs, has_logprobs
        self.names_ids = names_ids
        self.breakage = None  # (number, body) -> (status, headers, body) or None
        self.requests = []

    def answer(self, body):
        """(status, headers, JSON)."""
        with self.lock:
            number = len(self.requests)
            self.requests.append(body)
        if self.breakage is not None:
            found = self.breakage(number, body)
            if found is not None:
                return found
        if "prompt_logprobs" in body and not self.has_prompt_logprobs:
            return 400, {}, {"error": {"message": "unknown field prompt_logprobs"}}
        return 200, {}, {"choices": [self.choice(body)]}

    def choice(self, body):
        top = body.get("logprobs") if self.has_logprobs else None
        of_prompt = body.get("prompt_logprobs")
        if body.get("echo"):
            of_prompt = top
        if not self.has_logprobs:
            of_prompt = None
        params = SamplingParams(
            temperature=0.0,
            max_tokens=body["max_tokens"],
            ignore_eos=body.get("ignore_eos", False),
            logprobs=top,
            prompt_logprobs=of_prompt,
        )
        with self.lock:
            (output,) = self.llm.generate([body["prompt"]], params, use_tqdm=False)
        completion = output.outputs[0]
        ids, places = list(completion.token_ids), list(completion.logprobs or [])
        found = {"index": 0, "text": "".join(map(chr, ids)), "finish_reason": "length"}
        if body.get("echo"):
            ids = body["prompt"] + ids
            places = [*(output.prompt_logprobs or []), *places]
        if top is not None:
            found["logprobs"] = self.columns(ids, places)
        if body.get("return_token_ids") and self.names_ids:
            found["token_ids"] = list(completion.token_ids)
        if of_prompt is not None and not body.get("echo"):
            found["prompt_logprobs"] = [
                place and {str(k): {"logprob": v.logprob, "rank": v.rank} for k, v in place.items()}
                for place in output.prompt_logprobs
            ]
        return found

    def columns(self, ids, places):
        def name(token):
            return f"token_id:{token}" if self.names_ids else chr(token)

        return {
            "tokens": [name(token) for token in ids],
            "token_logprobs": [
                None if place is None else place[token].logprob
                for token, place in zip(ids, places, strict=True)
            ],
            "top_logprobs": [
                None if place is None else {name(k): v.logprob for k, v in place.items()}
                for place in places
            ],
        }


@contextmanager
def engine(folder, fault=None, dtype="float32"):
    """An engine, with a fault or healthy."""
    with LLM(
        str(folder), device="cpu", dtype=dtype, max_num_batched_tokens=48, max_num_seqs=8,
        num_kvcache_blocks=64, max_model_len=256,
    ) as llm:  # fmt: skip
        if fault is not None:
            fault(llm.executor.runner)
        yield llm


@contextmanager
def served(server):
    """The URL of a running server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send(200, {}, {"data": [{"id": MODEL}]})

        def do_POST(self):
            length = int(self.headers["Content-Length"])
            self.send(*server.answer(json.loads(self.rfile.read(length))))

        def send(self, status, headers, body):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # Closing waits for answers that nobody waits for any more: the engine is the next test's.
    httpd.daemon_threads = False
    thread = threading.Thread(target=httpd.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def wait(seconds):
    """A breakage: an answer that comes late."""

    def late(_number, _body):
        time.sleep(seconds)

    return late
