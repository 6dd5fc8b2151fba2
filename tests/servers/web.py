"""A web server on this machine: files with checksums, a hub's repositories, and faults on demand.

Where a command line is to be tried: python -m tests.servers.web FOLDER says what to set, and serves
FOLDER/BUCKET/FILE as gs://BUCKET/FILE and FOLDER/OWNER/NAME/ as hf:OWNER/NAME.
"""

import base64
import contextlib
import hashlib
import http.server
import json
import pathlib
import re
import sys
import threading
import time
import urllib.parse
from typing import NamedTuple

import google_crc32c


class Answer(NamedTuple):
    body: bytes = b''
    headers: dict[str, str] = {}
    status: int = 200


class Server(http.server.ThreadingHTTPServer):
    """Answers by path. `asked` is what was asked of it; the rest are faults."""

    daemon_threads = True

    def __init__(self):
        self.answers = dict[str, Answer]()
        self.asked = list[tuple[str, str, str | None]]()  # method, path, range
        self.cuts = list[int]()  # files end after so many bytes; each of these is used once
        self.refusals = list[int]()  # statuses of the next answers
        self.raw = list[bytes]()  # the next answers, byte for byte, after which it hangs up
        self.flipped = False  # the last bit of every file
        self.claims = 0  # bytes by which every file is said to be longer than it is
        self.seconds = 0.0  # that every file takes
        super().__init__(('127.0.0.1', 0), Handler)

    @property
    def url(self) -> str:
        return f'http://127.0.0.1:{self.server_port}'

    def absent(self, path: str) -> Answer:
        """What is said of a path where nothing is: by a hub with the reason."""
        repository = re.match(r'/api/models/[^/]+/[^/]+/', path)
        known = repository and any(one.startswith(repository[0]) for one in self.answers)
        known = 'RevisionNotFound' if known else 'RepoNotFound'
        return refused(404, 'EntryNotFound' if '/resolve/' in path else known)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *_):
        pass

    def do_GET(self):
        server, path = self.server, urllib.parse.unquote(self.path.partition('?')[0])
        server.asked.append((self.command, path, self.headers.get('Range')))
        if server.raw:
            self.wfile.write(server.raw.pop(0))
            self.close_connection = True
            return
        answer = server.answers.get(path, server.absent(path))
        if server.refusals:
            answer = Answer(status=server.refusals.pop(0))
        body, headers = answer.body, {'Content-Type': 'application/octet-stream'} | answer.headers
        etag, status = headers.get('ETag'), answer.status
        asked = re.fullmatch(r'bytes=(\d+)-(\d*)', self.headers.get('Range', ''))
        if asked and status == 200 and self.headers.get('If-Range', etag) == etag:
            start, end = int(asked[1]), min(int(asked[2] or len(body)), len(body) - 1)
            headers['Content-Range'] = f'bytes {start}-{end}/{len(body)}'
            body, status = body[start : end + 1], 206 if start < len(body) else 416
        file = not path.startswith('/api/') and status < 300
        if server.flipped and file:
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.send_response(status)
        headers |= {'Content-Length': str(len(body) + server.claims * file)} | answer.headers
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == 'HEAD':
            return
        time.sleep(server.seconds * file)
        if server.cuts and file:
            body = body[: server.cuts.pop(0)]
            self.close_connection = True
        self.wfile.write(body)
        if server.claims and file or not headers['Content-Length']:
            self.close_connection = True

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


def stored(data: bytes) -> Answer:
    """An object of a bucket, as storage.googleapis.com answers."""
    crc = base64.b64encode(google_crc32c.Checksum(data).digest()).decode()
    etag = f'"{hashlib.md5(data).hexdigest()}"'
    return Answer(data, {'ETag': etag, 'x-goog-hash': f'crc32c={crc}, md5=none'})


def raw(status: int, body: bytes = b'', **headers: object) -> bytes:
    """An answer byte for byte: a header whose value is a list comes as often."""
    lines = [f'HTTP/1.1 {status} said by the server']
    for name, values in headers.items():
        values = values if isinstance(values, list) else [values]
        lines += [f'{name.replace("_", "-")}: {value}' for value in values]
    return '\r\n'.join([*lines, '', '']).encode() + body


def repository(name: str, revisions: dict[str, dict[str, bytes]]) -> dict[str, Answer]:
    """The answers of a hub about a repository; of each revision the files by name."""
    answers = {}
    for revision, files in revisions.items():
        commit = commit_of(files)
        about = {'id': name, 'modelId': name, 'sha': commit, 'private': False, 'tags': []}
        about['siblings'] = [{'rfilename': file} for file in files]
        tree = [_entry(file, data) for file, data in files.items()]
        answers[f'/api/models/{name}/tree/{commit}'] = _json(tree)
        for named in revision, commit:
            answers[f'/api/models/{name}/revision/{named}'] = _json(about)
            for entry, (file, data) in zip(tree, files.items(), strict=True):
                linked = entry.get('lfs', {}).get('oid')
                headers = {'X-Repo-Commit': commit, 'ETag': f'"{linked or entry["oid"]}"'}
                if linked:
                    headers |= {'X-Linked-ETag': f'"{linked}"', 'X-Linked-Size': str(len(data))}
                answers[f'/{name}/resolve/{named}/{file}'] = Answer(data, headers)
    return answers


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(json.dumps([*map(_entry, files, files.values())]).encode()).hexdigest()


def refused(status: int, code: str) -> Answer:
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


def main(folder: str) -> None:
    answers = {}
    for owner in filter(pathlib.Path.is_dir, pathlib.Path(folder).iterdir()):
        for path in filter(pathlib.Path.is_file, owner.rglob('*')):
            answers[f'/{path.relative_to(folder)}'] = stored(path.read_bytes())
        for place in filter(pathlib.Path.is_dir, owner.iterdir()):
            files = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
            answers |= repository(f'{owner.name}/{place.name}', {'main': files})
    with serving(answers) as server:
        print(f'export STORAGE_EMULATOR_HOST={server.url} HF_ENDPOINT={server.url}', flush=True)
        threading.Event().wait()


if __name__ == '__main__':
    main(sys.argv[1])
