"""A Hub on this machine, for the real huggingface_hub client: create, commit, list and download model repositories.

Point a process at it with `HF_ENDPOINT=server.url` before huggingface_hub is imported; `client_environment` makes all
of such a process's environment. Repositories have branches, tags and commits; a commit of what is there already is
refused to no one but, as on the Hub, the client is told each file's hash and leaves out what it has not changed.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]  # path in the repository -> content


class Repository:
    """Commits (hash -> files), newest last, and what branches and tags point to."""

    def __init__(self) -> None:
        self.commits: dict[str, Files] = {}
        self.refs: dict[str, str] = {}
        self.branches = ["main"]
        self.refs["main"] = self.add({})

    def add(self, files: Files) -> str:
        named = f"{len(self.commits)}".encode() + b"".join(n.encode() + c for n, c in sorted(files.items()))
        commit = hashlib.sha1(named).hexdigest()
        self.commits[commit] = files
        return commit

    def find(self, revision: str) -> str | None:
        """The commit that a branch, tag or hash means."""
        return self.refs.get(revision, revision if revision in self.commits else None)


class LocalHub:
    """Use as a context manager; `repositories` maps an id to its `Repository`."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []  # method and path of each, in the order of their coming
        hub = self

        class Handler(_Handler):
            repositories = hub.repositories
            requests = hub.requests

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "LocalHub":
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def files(self, name: str, revision: str = "main") -> Files:
        """What a repository holds at a revision."""
        repository = self.repositories[name]
        commit = repository.find(revision)
        assert commit is not None, f"{name} has no revision {revision}"
        return repository.commits[commit]

    def client_environment(self, home: Path) -> Mapping[str, str]:
        """The environment of a process whose client talks to this Hub alone and keeps its files in `home`."""
        known = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        return {
            **known,
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "TRANSFORMERS_OFFLINE": "0",
            "HF_HOME": str(home),
            "HF_TOKEN": "hf_x",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }


def _blob(content: bytes) -> str:
    """The hash that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    repositories: dict[str, Repository]
    requests: list[str]
    protocol_version = "HTTP/1.1"
    lock = Lock()

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

    def _route(self) -> tuple[Repository | None, list[str]]:
        """The repository of `/api/models/owner/name/…`, and the rest of the path in parts."""
        parts = urlsplit(self.path).path.split("/")[1:]
        self.requests.append(f"{self.command} {self.path}")
        if parts[:2] != ["api", "models"] or len(parts) < 4:
            return None, []
        return self.repositories.get("/".join(parts[2:4])), [unquote(part) for part in parts[4:]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.lock:
            self._post(body)

    def _post(self, body: bytes) -> None:
        path = urlsplit(self.path).path
        repository, rest = self._route()
        if path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            known = name in self.repositories
            self.repositories.setdefault(name, Repository())
            self._answer({"url": f"http://127.0.0.1/{name}", "name": name}, 409 if known else 200)
            return
        if path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
            return
        if repository is None:
            self._missing("RepoNotFound")
            return
        kind, revision = rest[0], rest[1]
        commit = repository.find(revision)
        if kind == "branch":
            start = repository.find(json.loads(body or b"{}").get("startingPoint", "main"))
            known = revision in repository.refs
            if start is None:
                self._missing("RevisionNotFound")
            elif known:
                self._answer({"error": "Reference already exists"}, 409)
            else:
                repository.refs[revision] = start
                repository.branches.append(revision)
                self._answer({})
        elif commit is None:
            self._missing("RevisionNotFound")
        elif kind == "tag":
            repository.refs[json.loads(body)["tag"]] = commit
            self._answer({})
        elif kind == "preupload":
            held = repository.commits[commit]
            answers = []
            for file in json.loads(body)["files"]:
                answer = {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                if file["path"] in held:
                    answer["oid"] = _blob(held[file["path"]])
                answers.append(answer)
            self._answer({"files": answers})
        elif kind == "commit":
            files = dict(repository.commits[commit])
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "deletedFile":
                    del files[entry["value"]["path"]]
            new = repository.refs[revision] = repository.add(files)
            url = f"http://127.0.0.1/{'/'.join(path.split('/')[3:5])}/commit/{new}"
            self._answer({"success": True, "commitOid": new, "commitUrl": url, "hookOutput": ""})
        else:
            self._missing("EntryNotFound")

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        repository, rest = self._route()
        if path == "/api/whoami-v2":
            self._answer({"type": "user", "name": "me", "orgs": []})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", urlsplit(self.path).path):
            self._file(self.repositories.get(match[1]), unquote(match[2]), unquote(match[3]))
        elif repository is None:
            self._missing("RepoNotFound" if path.startswith("/api/models/") else "EntryNotFound")
        elif rest == ["refs"]:
            tags = [name for name in repository.refs if name not in repository.branches]
            named = {
                kind: [{"name": n, "ref": f"refs/{ref}/{n}", "targetCommit": repository.refs[n]} for n in names]
                for kind, ref, names in (("branches", "heads", repository.branches), ("tags", "tags", tags))
            }
            self._answer({**named, "converts": []})
        else:
            revision = rest[1] if len(rest) > 1 else "main"
            commit = repository.find(revision)
            if commit is None:
                self._missing("RevisionNotFound")
                return
            files = repository.commits[commit]
            name = "/".join(path.split("/")[3:5])
            if rest[:1] in ([], ["revision"]):
                siblings = [{"rfilename": file} for file in files]
                self._answer({"id": name, "modelId": name, "sha": commit, "siblings": siblings})
            elif rest[0] == "tree":
                self._answer([{"type": "file", "path": p, "size": len(c), "oid": _blob(c)} for p, c in files.items()])
            else:
                self._missing("EntryNotFound")

    def _file(self, repository: Repository | None, revision: str, name: str) -> None:
        if repository is None:
            self._missing("RepoNotFound")
            return
        commit = repository.find(revision)
        if commit is None:
            self._missing("RevisionNotFound")
            return
        content = repository.commits[commit].get(name)
        if content is None:
            self._answer({"error": "no such file"}, 404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return
        self._answer(content, ETag=f'"{_blob(content)}"', X_Repo_Commit=commit, Accept_Ranges="bytes")

    do_HEAD = do_GET
