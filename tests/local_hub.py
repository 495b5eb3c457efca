"""A Hub on this machine, for the real huggingface_hub client: create, commit, list and download model repositories.

Point a process at it with `HF_ENDPOINT=server.url` before huggingface_hub is imported. One revision a repository.
"""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit


class LocalHub:
    """Use as a context manager; `repositories` maps id -> path in the repository -> content."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        hub = self

        class Handler(_Handler):
            repositories = hub.repositories

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "LocalHub":
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(b"".join(name.encode() + content for name, content in sorted(files.items()))).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    repositories: dict[str, dict[str, bytes]]
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, content: object, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _missing(self, what: str) -> None:
        self._answer({"error": what}, 404, X_Error_Code=what, X_Error_Message=what)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urlsplit(self.path).path
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            known = name in self.repositories
            self.repositories.setdefault(name, {})
            self._answer({"url": f"http://127.0.0.1/{name}", "name": name}, 409 if known else 200)
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/[^/]+", path):
            files = json.loads(body)["files"]
            self._answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/[^/]+", path):
            files = self.repositories[match[1]]
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            commit = _commit_of(files)
            url = f"http://127.0.0.1/{match[1]}/commit/{commit}"
            self._answer({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})
        else:
            self._missing("EntryNotFound")

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/api/whoami-v2":
            self._answer({"type": "user", "name": "me", "orgs": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            files = self.repositories.get(match[1])
            if files is None:
                self._missing("RepoNotFound")
                return
            siblings = [{"rfilename": name} for name in files]
            self._answer({"id": match[1], "modelId": match[1], "sha": _commit_of(files), "siblings": siblings})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+(/.*)?", path):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.repositories.get(match[1], {}).items()
            ]
            self._answer(entries)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            files = self.repositories.get(match[1], {})
            if match[2] not in files:
                self._missing("EntryNotFound")
                return
            content = files[match[2]]
            tag = f'"{hashlib.sha1(content).hexdigest()}"'
            self._answer(content, ETag=tag, X_Repo_Commit=_commit_of(files), Accept_Ranges="bytes")
        else:
            self._missing("EntryNotFound")

    do_HEAD = do_GET
