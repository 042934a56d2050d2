"""A page with a widget whose kernel is this process: what a notebook does, without the notebook."""

import base64
import json
from pathlib import Path

PAGE = """<!doctype html><html><head><meta charset="utf-8"><style>body { margin: 8px; }
@media (prefers-color-scheme: dark) { body { background: #111; } }</style></head>
<body><div id="out"></div><script type="application/json" id="esm">%ESM%</script><script type="module">
class Model {
  constructor(state) { Object.assign(this, { state, listeners: new Map() }); }
  get(name) { return this.state[name]; }
  on(name, act) { this.listeners.set(name, [...(this.listeners.get(name) ?? []), act]); }
  off(name, act) { this.listeners.set(name, (this.listeners.get(name) ?? []).filter((one) => one !== act)); }
  fire(name, ...values) { for (const act of this.listeners.get(name) ?? []) act(...values); }
  async send(content) { this.take(JSON.parse(await window.kernel(JSON.stringify(content)))); }
  take({ state, messages }) {
    const text = (value) => JSON.stringify(value);
    const changed = Object.keys(state).filter((name) => text(state[name]) !== text(this.state[name]));
    for (const name of changed) this.state[name] = state[name];
    for (const name of changed) this.fire(`change:${name}`);
    for (const { content, buffers } of messages) {
      const bytes = (one) => new DataView(Uint8Array.from(atob(one), (c) => c.charCodeAt(0)).buffer);
      this.fire("msg:custom", content, buffers.map(bytes));
    }
  }
}
const text = JSON.parse(document.getElementById("esm").textContent);
const { default: widget } = await import(URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
const first = JSON.parse(await window.kernel("null"));
window.model = new Model(first.state);
const el = document.getElementById("out");
window.leave = widget.render({ model: window.model, el });
window.host = el.firstElementChild;
</script></body></html>"""


class Notebook:
    """A widget of this process in a page of Chromium, and what the page did that it must not do."""

    def __init__(self, page, explorer, folder: Path) -> None:
        self.page, self.explorer, self.sent = page, explorer, []
        self.complaints, self.requests, self.asked = [], [], []
        explorer.send = lambda content, buffers=None: self.sent.append((content, buffers or []))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.expose_function("kernel", self.answer)
        text = json.dumps(type(explorer)._esm if isinstance(type(explorer)._esm, str) else str(explorer._esm))
        path = folder / "notebook.html"
        path.write_text(PAGE.replace("%ESM%", text.replace("<", "\\u003c")), encoding="utf-8")
        page.goto(path.resolve().as_uri())
        page.wait_for_selector("[data-ready]", timeout=60_000, state="attached")

    def answer(self, text: str) -> str:
        request = json.loads(text)
        self.sent.clear()
        if request is not None:
            self.asked.append(request)
            self.explorer._received(self.explorer, request, [])
        return json.dumps({"state": self.state(), "messages": self.messages()})

    def state(self):
        held = self.explorer.get_state()
        return {name: value for name, value in held.items() if name.startswith("_") and name in STATE}

    def messages(self):
        return [
            {"content": content, "buffers": [base64.b64encode(one).decode() for one in buffers]}
            for content, buffers in self.sent
        ]

    def from_python(self) -> None:
        """Send what Python changed by itself."""
        self.page.evaluate("(reply) => model.take(reply)", {"state": self.state(), "messages": []})

    def until(self, condition: str, seconds: int = 20) -> None:
        self.page.wait_for_function(condition, timeout=1000 * seconds)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)


STATE = ("_selection", "_busy", "_problem", "_changes", "_summary", "_code", "_rows", "_row", "_shown")
