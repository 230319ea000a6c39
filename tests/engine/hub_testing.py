"""A stand-in for the Hugging Face hub on the loopback, and calls of another process to it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REVISIONS = {"main": "a" * 40, "v1": "b" * 40}


class StandInHub:
    """Serves `repos`: id -> {file: bytes}; a repo of `gated` wants the token `right`."""

    def __init__(self, repos, gated=()):
        self.repos, self.gated = repos, gated
        self.requests = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_HEAD(self):
                hub.answer(self, False)

            def do_GET(self):
                hub.answer(self, True)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()

    def fetched(self):
        """Names of the files whose bytes were asked for since the last call."""
        names = [path.split("/resolve/")[1].split("/", 1)[1] for path in self.requests]
        self.requests.clear()
        return sorted(names)

    def answer(self, request, with_body):
        path = request.path.split("?")[0].strip("/")
        parts = path.split("/")
        is_api = parts[0] == "api"
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        files = self.repos.get(repo)
        if files is None:
            return self._send(request, 404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
        token = request.headers.get("Authorization", "")
        if repo in self.gated and not is_api and token != "Bearer right":
            return self._send(request, 403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
        if is_api:
            return self._describe(request, repo, parts[4:], files, with_body)
        revision, name = parts[3], "/".join(parts[4:])
        if name not in files:
            return self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        if with_body:
            self.requests.append(path)
        headers = {
            "ETag": f'"{hashlib.sha1(files[name]).hexdigest()}"',
            "X-Repo-Commit": REVISIONS.get(revision, revision),
        }
        return self._send(request, 200, files[name], headers, with_body)

    def _describe(self, request, repo, rest, files, with_body):
        kind, revision = ([*rest, "revision", "main"])[:2]
        commit = REVISIONS.get(revision, revision if len(revision) == 40 else None)
        if commit is None:
            headers = {"X-Error-Code": "RevisionNotFound"}
            return self._send(request, 404, b"", headers, with_body)
        if kind == "tree":
            body = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for name, data in files.items()
            ]
        else:
            siblings = [{"rfilename": name} for name in files]
            body = {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings}
        headers = {"Content-Type": "application/json"}
        return self._send(request, 200, json.dumps(body).encode(), headers, with_body)

    def _send(self, request, code, data, headers, with_body):
        request.send_response(code)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if with_body:
            request.wfile.write(data)


def environment(home, endpoint, **more):
    """Of a process whose hub is the stand-in; the library reads it once, when it is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, **more}


_SCRIPT = """
import json, sys
import engine.hub.folders as hub
assert "torch" not in sys.modules
answers = []
for function, arguments, options in json.loads(sys.argv[1]):
    try:
        answers.append(str(getattr(hub, function)(*arguments, **options)))
    except hub.ConfigError as error:
        answers.append(f"ConfigError: {error}")
    except hub.InputError as error:
        answers.append(f"InputError: {error}")
print(json.dumps(answers))
"""


def ask(home, endpoint, *calls, **more):
    """Answers of `engine.hub` in another process to calls (function, arguments, options)."""
    normal = [(function, arguments, options) for function, arguments, *options in calls]
    plain = [(function, list(args), rest[0] if rest else {}) for function, args, rest in normal]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, json.dumps(plain)],
        env=environment(home, endpoint, **more),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout), done.stderr
