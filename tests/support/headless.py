"""A page in headless Chromium, driven by a script that is put at its end; what it found comes back as JSON."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RUN = """<script>
const R = {}, P = document.createElement("pre");
P.id = "result-of-test"; P.hidden = true;
try { %s } catch (error) { R.error = String(error) + error.stack; }
P.textContent = JSON.stringify(R);
document.body.append(P);
</script></body>"""


def driven(page: Path, script: str, *, view: str = "overview", picture: Path | None = None) -> dict[str, Any]:
    """Open a page without any network, run a script in it that fills `R`, and return `R`.

    Args:
        page: the file.
        script: JavaScript, run when the page has been built.
        view: the part of the page that is open.
        picture: where a screenshot of 1440 x 900 goes afterwards.
    """
    assert CHROMIUM is not None
    copy = page.with_name(f"driven_{page.name}")
    head, _, tail = page.read_text(encoding="utf-8").rpartition("</body>")
    copy.write_text(head + RUN % script + tail, encoding="utf-8")
    line = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1440,900"]
    line += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={page.parent / 'chromium'}"]
    address = f"{copy.as_uri()}#{view}"
    if picture is not None:
        shot = [*line, "--virtual-time-budget=3000", f"--screenshot={picture}", address]
        subprocess.run(shot, capture_output=True, timeout=60, check=True)
    done = subprocess.run([*line, "--dump-dom", address], capture_output=True, timeout=60, check=True)
    found = re.search(r'<pre id="result-of-test"[^>]*>(.*?)</pre>', done.stdout.decode(), re.DOTALL)
    assert found is not None, done.stdout.decode()[-500:]
    result: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert "error" not in result, result["error"]
    return result
