"""A stand-in for an engine process, with children and shared memory like the real one: `fake_engine.py PORT MODE`."""

import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import resource_tracker, shared_memory

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def main(port, mode):
    print("starting", flush=True)
    if mode == "fail":
        print("(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] Traceback (most recent call last):")
        print('(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1]   File "x.py", line 1, in f')
        print("(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] ValueError: no room for one request")
        print("RuntimeError: Engine core initialization failed. See root cause above.")
        sys.exit(3)
    if mode == "mute":
        time.sleep(600)
    memory = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(memory._name, "shared_memory")  # as after a kill: nobody cleans up
    memory.buf[0] = 1
    unmapped = shared_memory.SharedMemory(create=True, size=4096)
    unmapped.close()  # nothing leads to it but Python's tracker
    child = subprocess.Popen([sys.executable, "-c", CHILD])
    print("SHARED", memory.name, "UNMAPPED", unmapped.name, "CHILD", child.pid, flush=True)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("TMP", os.environ["TMPDIR"], flush=True)
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
