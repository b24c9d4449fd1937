"""Object stores for tests: a real server in a process of its own, and a server whose answers a test defines."""

import http.server
import os
import re
import shlex
import subprocess
import sys
import threading

import boto3
import botocore.config

VARIABLES = {
    "AWS_ACCESS_KEY_ID": "someone",
    "AWS_SECRET_ACCESS_KEY": "proof-of-someone",
    "AWS_REGION": "us-east-1",
    "NO_PROXY": "127.0.0.1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Server:
    """The server moto, or the command of SPILLWAY_TEST_S3_SERVER, which prints `http://ADDRESS:PORT`."""

    def __init__(self, folder):
        command = os.environ.get("SPILLWAY_TEST_S3_SERVER")
        command = shlex.split(command) if command else [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        self.process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        said = []
        for line in self.process.stdout:
            said.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found:
                break
        else:
            raise RuntimeError(f"no server: {''.join(said)}")
        self.endpoint = found.group()
        threading.Thread(target=lambda: [None for _ in self.process.stdout], daemon=True).start()
        self.client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=VARIABLES["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=VARIABLES["AWS_SECRET_ACCESS_KEY"],
            region_name=VARIABLES["AWS_REGION"],
            config=botocore.config.Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required"),
        )

    def bucket(self, name):
        self.client.create_bucket(Bucket=name)
        return name

    def keys(self, bucket):
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return [found["Key"] for page in pages for found in page.get("Contents", ())]

    def read(self, bucket, key):
        return self.client.get_object(Bucket=bucket, Key=key)["Body"].read()

    def write(self, bucket, key, content):
        self.client.put_object(Bucket=bucket, Key=key, Body=bytes(content))

    def kill(self):
        self.process.kill()
        self.process.wait()


class Scripted:
    """A store in a dictionary that calls `judge(method, key)` before each request. The result is a status to refuse
    the request with, None to serve it, "cut" to break off in the middle, or "hang" to send nothing until the end."""

    def __init__(self, judge):
        objects, over = {}, threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def answer(self, status, body=b"", **headers):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def serve(self):
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                key = self.path.split("?")[0].removeprefix("/bucket/").strip("/")
                verdict = judge(self.command, key)
                if verdict == "hang":
                    over.wait(60)
                elif verdict == "cut":
                    self.send_response(206)
                    self.send_header("Content-Range", f"{self.headers['Range'].replace('=', ' ')}/*")
                    self.send_header("Content-Length", "1000000")
                    self.end_headers()
                    self.wfile.write(b"x" * 1000)
                    self.close_connection = True
                elif verdict:
                    self.answer(verdict, b"<Error><Code>Told</Code><Message>by the test</Message></Error>")
                elif self.command == "PUT":
                    objects[key] = content
                    self.answer(200)
                elif self.command == "DELETE":
                    objects.pop(key, None)
                    self.answer(204)
                elif self.headers.get("Range"):
                    first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                    self.answer(206, objects[key][first : last + 1], Content_Range=f"bytes {first}-{last}/{len(objects[key])}")
                else:
                    rows = "".join(
                        f"<Contents><Key>{key}</Key><Size>{len(content)}</Size></Contents>" for key, content in sorted(objects.items())
                    )
                    self.answer(
                        200,
                        (
                            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
                            f"<IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
                        ).encode(),
                    )

            do_GET = do_PUT = do_DELETE = serve

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.over = over
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.over.set()
        self.server.shutdown()
        self.server.server_close()
