"""Google Cloud Storage over loopback, as far as tensorstore, gcsfs and google-cloud-storage ask.

Its JSON API (cloud.google.com/storage/docs/json_api): objects with generations and conditions,
listings in pages, copies, uploads in one, two and many parts. And of S3, as far as obstore asks:
listings, ranges and uploads in one part, with an ETag instead of a generation.
"""

import base64
import contextlib
import http.server
import itertools
import json
import re
import threading
import time
import typing
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

import google_crc32c


class Object(typing.NamedTuple):
    data: bytes
    generation: int
    created: str
    metadata: dict[str, str]


class Refused(Exception):
    """With an HTTP status, and a message."""


class Bucket(http.server.ThreadingHTTPServer):
    """One bucket; `objects` by name.

    `fault(method, path)` is the status to answer with, if any; `change(name, body)` is what is sent
    of the body of an object.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, name='bucket'):
        self.name, self.url = name, ''
        self.objects, self.uploads = {}, {}
        self.lock, self.numbers = threading.RLock(), itertools.count(1_700_000_000_000_000)
        self.sent = []  # (name, first byte, byte after the last) of each object that was read
        self.clear()
        super().__init__(('127.0.0.1', 0), _Handler)
        self.url = f'http://127.0.0.1:{self.server_port}'

    def clear(self):
        """Removes all objects and faults."""
        self.objects.clear()
        self.sent.clear()
        self.fault, self.change = lambda method, path: None, lambda name, body: body

    def environment(self):
        """Of a process that takes this for Google's."""
        return {
            'STORAGE_EMULATOR_HOST': self.url,
            'TENSORSTORE_GCS_HTTP_URL': self.url,
            'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'none',
            'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',  # which asks Google by gRPC
            'NO_GCE_CHECK': 'true',
            'AWS_ENDPOINT_URL': self.url,
            'AWS_ACCESS_KEY_ID': 'none',
            'AWS_SECRET_ACCESS_KEY': 'none',
        }

    def names(self, start=''):
        """Of all objects that begin so, in order."""
        with self.lock:
            return sorted(name for name in self.objects if name.startswith(start))

    def text(self, name):
        return self.objects[name].data.decode()

    def handle_error(self, *_):
        """Clients that were killed are no news."""

    def put(self, name, data, conditions, metadata=None):
        with self.lock:
            self.require(name, conditions)
            created = time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime())
            self.objects[name] = Object(data, next(self.numbers), created, metadata or {})
            return self.described(name)

    def remove(self, name, conditions):
        with self.lock:
            self.found(name)
            self.require(name, conditions)
            del self.objects[name]

    def require(self, name, conditions):
        wanted = conditions.get('ifGenerationMatch')
        there = self.objects.get(name)
        if wanted is not None and int(wanted) != (there.generation if there else 0):
            raise Refused(412, 'conditionNotMet')
        if there and conditions.get('ifGenerationNotMatch') == str(there.generation):
            raise Refused(304, 'not modified')

    def found(self, name):
        if name not in self.objects:
            raise Refused(404, f'No such object: {self.name}/{name}')
        return self.objects[name]

    def described(self, name):
        data, generation, created, metadata = self.found(name)
        return {
            'bucket': self.name,
            'name': name,
            'generation': str(generation),
            'metageneration': '1',
            'size': str(len(data)),
            'timeCreated': created,
            'updated': created,
            'etag': str(generation),
            'metadata': metadata,
            'crc32c': base64.b64encode(google_crc32c.Checksum(data).digest()).decode(),
        }

    def listing(self, query):
        """A page: objects, and what stands before the delimiter in the names of the others."""
        prefix, delimiter = query.get('prefix', ''), query.get('delimiter')
        most, after = int(query.get('maxResults', 1000)), query.get('pageToken', '')
        items, prefixes, last = [], [], None
        with self.lock:
            for name in self.names(prefix):
                cut = name.find(delimiter, len(prefix)) if delimiter else -1
                key = name if cut < 0 else name[: cut + len(delimiter)]
                first, end = query.get('startOffset', ''), query.get('endOffset', '\U0010ffff')
                in_range = first <= name < end
                if not in_range or key <= after or key in prefixes:
                    continue
                if len(items) + len(prefixes) == most:
                    return {'items': items, 'prefixes': prefixes, 'nextPageToken': last}
                if cut < 0:
                    items.append(self.described(name))
                else:
                    prefixes.append(key)
                last = key
        return {'items': items, 'prefixes': prefixes}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    disable_nagle_algorithm = True  # else a small answer may wait for 40 ms

    def log_message(self, *_):
        pass

    def handle_any(self):
        body = self._body()
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        try:
            if status := self.server.fault(self.command, self.path):
                raise Refused(status, 'as the test wants it')
            self._answer(url.path, query, body)
        except Refused as refused:
            status, message = refused.args
            self._json({'error': {'code': status, 'message': message}}, status)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = handle_any

    def _body(self):
        if not self.headers.get('Transfer-Encoding'):
            return self.rfile.read(int(self.headers.get('Content-Length') or 0))
        parts = []
        while size := int(self.rfile.readline().split(b';')[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b''.join(parts)

    def _answer(self, path, query, body):
        bucket = self.server
        if not path.startswith(('/upload', '/download', '/storage', '/resumable')):  # S3, XML API
            name, _, object_name = unquote(path[1:]).partition('/')
            if name != bucket.name:
                raise Refused(404, 'NoSuchBucket')
            if self.command == 'PUT':
                self._send(b'', 200, {'ETag': bucket.put(object_name, body, query)['etag']})
            elif object_name:
                self._media(object_name, query)
            else:
                self._xml_listing(query)
            return
        match = re.fullmatch(
            r'(/upload|/download)?/(?:storage/v1|resumable)/b/([^/]+)(?:/o(?:/(.*))?)?', path
        )
        kind, name, object_name = match.groups()
        if name != bucket.name:
            raise Refused(404, 'The specified bucket does not exist.')
        if kind == '/upload':
            self._upload(query, body)
        elif object_name is None:
            self._json(bucket.listing(query))
        elif copied := re.fullmatch(r'(.*)/copyTo/b/[^/]+/o/(.*)', object_name):
            data = bucket.found(unquote(copied[1])).data
            self._json(bucket.put(unquote(copied[2]), data, query))
        elif self.command == 'DELETE':
            bucket.remove(unquote(object_name), query)
            self._send(b'', 204)
        elif kind == '/download' or query.get('alt') == 'media':
            self._media(unquote(object_name), query)
        else:
            self._json(bucket.described(unquote(object_name)))

    def _media(self, name, query):
        data, generation, *_ = self.server.found(name)
        self.server.require(name, query)
        headers = {'x-goog-generation': str(generation), 'x-goog-metageneration': '1'}
        headers |= {'ETag': str(generation), 'Last-Modified': 'Mon, 30 Nov 2026 00:00:00 GMT'}
        asked = re.fullmatch(r'bytes=(\d*)-(\d*)', self.headers.get('Range') or '')
        if not asked or not data:
            self._send(data, 200, headers)
            return
        start = int(asked[1]) if asked[1] else max(0, len(data) - int(asked[2]))
        stop = min(int(asked[2]) + 1, len(data)) if asked[1] and asked[2] else len(data)
        if start >= len(data):
            raise Refused(416, 'out of range')
        self.server.sent.append((name, start, stop))
        headers['Content-Range'] = f'bytes {start}-{stop - 1}/{len(data)}'
        body = self.server.change(name, data[start:stop])
        self._send(body, 206, headers | {'Content-Length': str(stop - start)})

    def _xml_listing(self, query):
        page = self.server.listing(query | {'pageToken': query.get('continuation-token', '')})
        next_page = page.get('nextPageToken', '')
        items = [
            f'<Contents><Key>{escape(item["name"])}</Key><Size>{item["size"]}</Size>'
            f'<LastModified>{item["updated"]}</LastModified><ETag>{item["etag"]}</ETag></Contents>'
            for item in page['items']
        ]
        items += [
            f'<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>'
            for prefix in page['prefixes']
        ]
        if next_page:
            items.append(f'<NextContinuationToken>{escape(next_page)}</NextContinuationToken>')
        text = f'<ListBucketResult>{"".join(items)}</ListBucketResult>'
        self._send(text.encode(), 200, {'Content-Type': 'application/xml'})

    def _upload(self, query, body):
        bucket = self.server
        if 'upload_id' in query:
            name, conditions, parts, metadata = bucket.uploads[query['upload_id']]
            parts.append(body)
            total = self.headers.get('Content-Range', '/*').rpartition('/')[2]
            size = sum(map(len, parts))
            if (
                total == '*'
                and self.headers.get('Content-Range')
                or total != '*'
                and size < int(total)
            ):
                self._send(b'', 308, {'Range': f'bytes=0-{size - 1}'} if size else {})
            else:
                self._json(bucket.put(name, b''.join(parts), conditions, metadata))
        elif query.get('uploadType') == 'media':
            self._json(bucket.put(query['name'], body, query))
        elif query.get('uploadType') == 'multipart':
            boundary = re.search('boundary="?([^";]+)', self.headers['Content-Type'])[1].encode()
            _, first, second = body.split(b'--' + boundary)[:3]  # and the end of them
            (described, data) = (re.split(b'\r?\n\r?\n', p, maxsplit=1)[1] for p in (first, second))
            data, about = re.sub(rb'\r?\n\Z', b'', data), json.loads(described)
            name = query.get('name') or about['name']
            self._json(bucket.put(name, data, query, about.get('metadata')))
        else:
            number, about = str(next(bucket.numbers)), json.loads(body or '{}')
            name = query.get('name') or about['name']
            bucket.uploads[number] = name, query, [], about.get('metadata')
            where = f'{bucket.url}/upload/storage/v1/b/{bucket.name}/o?upload_id={number}'
            self._send(b'{}', 200, {'Location': where})

    def _json(self, value, status=200):
        self._send(json.dumps(value).encode(), status, {'Content-Type': 'application/json'})

    def _send(self, body, status, headers=()):
        self.send_response(status)
        headers = {'Content-Length': str(len(body)), **dict(headers)}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD' and status not in (204, 304):
            self.wfile.write(body)
        if headers['Content-Length'] != str(len(body)):
            self.close_connection = True


@contextlib.contextmanager
def serving(name='bucket'):
    """A bucket that is there within."""
    bucket = Bucket(name)
    thread = threading.Thread(target=bucket.serve_forever, daemon=True)
    thread.start()
    try:
        yield bucket
    finally:
        bucket.shutdown()
        thread.join()
        bucket.server_close()
