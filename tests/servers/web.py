"""A web server on this machine: files, a hub's repositories, and faults on demand."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
import time
import urllib.parse
from typing import NamedTuple


class Answer(NamedTuple):
    body: bytes = b''
    headers: dict[str, str] = {}
    status: int = 200


class Server(http.server.ThreadingHTTPServer):
    """Answers by path. `requests` lists the (method, path) of each request; the rest are faults."""

    daemon_threads = True

    def __init__(self):
        self.answers = dict[str, Answer]()
        self.requests = list[tuple[str, str]]()
        self.cut: int | None = None  # bytes after which every file ends
        self.flipped = ''  # the ending of the files whose last bit is flipped
        super().__init__(('127.0.0.1', 0), Handler)

    @property
    def url(self) -> str:
        return f'http://127.0.0.1:{self.server_port}'

    def absent(self, path: str) -> Answer:
        """Answers for a missing path: a hub's answer has the reason."""
        repository = re.match(r'/api/(models|datasets)/[^/]+/[^/]+/', path)
        known = repository and any(one.startswith(repository[0]) for one in self.answers)
        known = 'RevisionNotFound' if known else 'RepoNotFound'
        return error(404, 'EntryNotFound' if '/resolve/' in path else known)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *_):
        pass

    def do_GET(self):
        server, path = self.server, urllib.parse.unquote(self.path.partition('?')[0])
        server.requests.append((self.command, path))
        answer = server.answers.get(path, server.absent(path))
        body = answer.body
        if server.flipped and path.endswith(server.flipped):
            body = body[:-1] + bytes([body[-1] ^ 1])
        status = answer.status
        headers = {'Content-Type': 'application/octet-stream', 'Content-Length': str(len(body))}
        asked = re.fullmatch(r'bytes=(\d+)-(\d+)', self.headers.get('Range') or '')
        if asked and status == 200:
            status, size = 206, len(body)
            body = body[int(asked[1]) : int(asked[2]) + 1]
            headers['Content-Range'] = f'bytes {asked[1]}-{int(asked[1]) + len(body) - 1}/{size}'
            headers['Content-Length'] = str(len(body))
        self.send_response(status)
        for name, value in (headers | answer.headers).items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.close_connection |= not (headers | answer.headers)['Content-Length']
        if self.command == 'HEAD':
            return
        is_file = not path.startswith('/api/') and answer.status < 300
        self.close_connection |= is_file and server.cut is not None
        self.wfile.write(body[: server.cut] if is_file else body)

    do_HEAD = do_GET


@contextlib.contextmanager
def serving(answers=None):
    server = Server()
    server.answers |= answers or {}
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def repository(
    name: str, revisions: dict[str, dict[str, bytes]], kind: str = 'models'
) -> dict[str, Answer]:
    """The answers of a hub about a repository; of each revision the files by name."""
    answers = {}
    folder = '' if kind == 'models' else f'/{kind}'
    for revision, files in revisions.items():
        commit = commit_of(files)
        about = {'id': name, 'modelId': name, 'sha': commit, 'private': False, 'tags': []}
        about['siblings'] = [
            {'rfilename': file, 'size': len(data), 'blobId': ''} for file, data in files.items()
        ]
        tree = [_entry(file, data) for file, data in files.items()]
        answers[f'/api/{kind}/{name}/tree/{commit}'] = _json(tree)
        answers.setdefault(f'/api/{kind}/{name}', _json(about))
        for named in revision, commit:
            answers[f'/api/{kind}/{name}/revision/{named}'] = _json(about)
            for entry, (file, data) in zip(tree, files.items(), strict=True):
                linked = entry.get('lfs', {}).get('oid')
                headers = {'X-Repo-Commit': commit, 'ETag': f'"{linked or entry["oid"]}"'}
                if linked:
                    headers |= {'X-Linked-ETag': f'"{linked}"', 'X-Linked-Size': str(len(data))}
                answers[f'{folder}/{name}/resolve/{named}/{file}'] = Answer(data, headers)
    return answers


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(json.dumps([*map(_entry, files, files.values())]).encode()).hexdigest()


def error(status: int, code: str) -> Answer:
    """What a hub says where something is not there, or not for everybody."""
    return Answer(b'{"error": "no"}', {'X-Error-Code': code, 'X-Error-Message': code}, status)


def _entry(file: str, data: bytes) -> dict:
    oid = hashlib.sha1(b'blob %d\0' % len(data) + data).hexdigest()
    entry = {'type': 'file', 'path': file, 'size': len(data), 'oid': oid}
    if file.endswith(('.safetensors', '.bin')):
        digest = hashlib.sha256(data).hexdigest()
        entry['lfs'] = {'oid': digest, 'size': len(data), 'pointerSize': 130}
    return entry


def _json(value) -> Answer:
    return Answer(json.dumps(value).encode(), {'Content-Type': 'application/json'})


def wait_until(condition, seconds=10):
    """Waits for an event that another thread or process causes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
