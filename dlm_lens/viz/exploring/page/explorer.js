// The widget: a page whose recordings are in a kernel, and what can be hidden, edited and asked there.

const LATE = 250; // milliseconds after which a picture that waits for the kernel is dimmed
const SETTLED = 200; // after which a changed selection is asked about

// Red, green, blue and opacity, 0 to 255, of a colour in any notation: "rgb(...)", "color(srgb 1 1 1)", "oklch(...)".
function painted(colour) {
  const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  pen.fillStyle = colour;
  pen.fillRect(0, 0, 1, 1);
  return [...pen.getImageData(0, 0, 1, 1).data];
}

// "dark" or "light": by the background on which the widget stands; where all is transparent, as VS Code, Colab and
// marimo say it, or by what the reader prefers.
function hostTheme(element) {
  for (let at = element; at; at = at.parentElement ?? at.getRootNode()?.host) {
    const [red, green, blue, opacity] = painted(getComputedStyle(at).backgroundColor);
    if (opacity > 127) return lightness([red, green, blue]) < 0.3 ? "dark" : "light";
  }
  const [page, body] = [document.documentElement, document.body];
  const said = (kind) => body.matches(`.vscode-${kind}, .${kind}`) || page.matches(`[theme="${kind}"], .${kind}`);
  if (said("dark") || body.matches(".vscode-high-contrast:not(.vscode-high-contrast-light)")) return "dark";
  if (said("light")) return "light";
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

class ExplorerPage extends Page {
  constructor(root, host, model) {
    super(root, host);
    Object.assign(this, { host, model, kernel: new Kernel(model, (slow) => this.paintWork(slow)), lives: new Map(), key: null, row: null, loads: 0, sent: [] });
    this.on = { lens: false, pattern: false };
    this.state.link = "step";
  }

  async begin() {
    this.takeTheme(hostTheme(this.host.parentElement));
    this.follow("_shown", () => this.load());
    this.follow("_busy", () => this.paintWork());
    this.follow("_problem", () => this.paintProblem());
    this.follow("_selection", () => this.takeSelection());
    for (const name of ["_changes", "_summary", "_code"]) this.follow(name, () => this.paintChanges());
    this.followTheme();
    this.control("prompts").hidden = this.model.get("_rows").length < 2;
    this.control("prompt").append(...this.model.get("_rows").map((text, i) => new Option(`row ${i}: ${visible(text)}`, i)));
    this.listenHand();
    await this.load();
    this.listen();
    this.host.dataset.ready = "yes";
  }

  follow(name, act) {
    this.followed ??= [];
    const heard = () => act();
    this.followed.push([`change:${name}`, heard]);
    this.model.on(`change:${name}`, heard);
  }

  followTheme() {
    const again = () => {
      const theme = hostTheme(this.host.parentElement);
      if (theme === this.look.theme) return;
      this.takeTheme(theme);
      if (this.panes.length) this.paint();
    };
    this.themes = new MutationObserver(again);
    for (const one of [document.documentElement, document.body]) this.themes.observe(one, { attributes: true });
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", again);
    this.themed = again;
  }

  leave() {
    super.leave();
    this.kernel.leave();
    this.themes.disconnect();
    this.scheme.removeEventListener("change", this.themed);
    for (const [name, heard] of this.followed) this.model.off(name, heard);
    clearTimeout(this.telling);
    clearTimeout(this.asking);
    clearTimeout(this.dimming);
  }

  // Get the runs that the kernel shows now, unless they are here.
  async load() {
    this.loads += 1;
    const load = this.loads;
    const shown = Object.entries(this.model.get("_shown"));
    const lives = await Promise.all(shown.map(([side, version]) => this.live(side, version)));
    if (load !== this.loads || lives.some((live) => !live)) return;
    this.lives = new Map(lives.map((live) => [live.version, live]));
    const first = this.panes.length === 0 || this.row !== this.model.get("_row");
    const held = this.heldFocus();
    this.take(lives, lives.length > 1 ? ["the run", "its twin, with the changes"] : [""]);
    this.panes.forEach((pane, i) => this.equip(pane, lives[i].side));
    if (first) this.start(lives[0]);
    else this.paint();
    held();
  }

  // Puts the focus back to where it was in the panes, after they have been made anew.
  heldFocus() {
    const focused = this.root.activeElement;
    const from = this.panes.findIndex((pane) => focused && pane.root.contains(focused));
    if (from < 0) return () => {};
    const kind = focused.classList.contains("cell") ? "cell" : focused.className;
    return () => {
      const pane = this.panes[Math.min(from, this.panes.length - 1)];
      const target = kind === "cell" ? pane.cellOf[Math.min(this.key ?? 0, pane.recorded.keys - 1)] : kind && pane.root.getElementsByClassName(kind)[0];
      if (target) target.focus({ preventScroll: true });
    };
  }

  async live(side, version) {
    if (this.lives.has(version)) return this.lives.get(version);
    const answer = await this.kernel.ask({ kind: "run", side, version });
    return answer && Live.from(this.kernel, side, version, answer.content);
  }

  start(live) {
    const { state } = this;
    this.row = this.model.get("_row");
    this.control("prompt").value = this.row;
    this.control("prompted").textContent = `prompt ${this.row + 1} of ${this.model.get("_rows").length}`;
    this.control("linking").hidden = true;
    this.listRules([...live.stored.keys()]);
    this.listLevels([live]);
    this.take_(this.model.get("_selection"), live);
    const rule = live.about.rule;
    if (state.rule === null) this.takeRule(rule.name, rule.value);
    else this.takeRule(state.rule.name, state.rule.value);
    this.paintChanges();
    this.paintProblem();
    this.paintWork();
  }

  // What the widget adds to a pane of the report: tokens that can be selected, lens and pattern.
  equip(pane, side) {
    pane.side = side;
    const [lens, pattern] = this.control("extra").content.cloneNode(true).children;
    pane.root.querySelector(".two").before(lens);
    pane.root.querySelector(".two").after(pattern);
    for (const name of ["strongest", "sinks"]) pane.root.querySelector(`table.${name}`).parentElement.classList.add("short");
    listenPattern(pane);
    // What comes out belongs to the canvas.
    const final = pane.root.querySelector("details.final");
    pane.cells.closest("section").after(final);
    final.open = true;
    const { cells } = pane;
    cells.setAttribute("role", "listbox");
    cells.setAttribute("aria-label", `Canvas of ${side === "run" ? "the run" : "the twin"}`);
    pane.cellOf.forEach((cell, key) => {
      cell.setAttribute("role", "option");
      cell.tabIndex = key === (this.key ?? 0) ? 0 : -1;
    });
    cells.addEventListener("click", (event) => {
      const cell = event.target.closest(".cell");
      if (cell) this.pick(Number(cell.dataset.key));
    });
    cells.addEventListener("keydown", (event) => this.keyedInCells(pane, event));
    pane.grid.addEventListener("keydown", (event) => {
      if (event.key === "x") this.hideHead();
    });
  }

  keyedInCells(pane, event) {
    const last = pane.recorded.keys - 1;
    const now = pane.cellOf.indexOf(event.target.closest(".cell"));
    const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last, ArrowUp: this.above(pane, now, -1), ArrowDown: this.above(pane, now, 1) };
    if (event.key in moves) {
      const key = Math.min(Math.max(moves[event.key], 0), last);
      this.pick(key);
      pane.cellOf[key].focus();
    } else if (event.key === "x") this.hideKey();
    else if (event.key === "Enter" || event.key === " ") this.pick(now);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // The nearest cell of the line above or below.
  above(pane, now, direction) {
    const boxes = pane.cellOf.map((cell) => cell.getBoundingClientRect());
    const middle = (box) => (box.left + box.right) / 2;
    const lines = boxes.map((box, key) => key).filter((key) => Math.sign(boxes[key].top - boxes[now].top) === direction);
    const near = (key) => [Math.abs(boxes[key].top - boxes[now].top), Math.abs(middle(boxes[key]) - middle(boxes[now]))];
    lines.sort((a, b) => near(a)[0] - near(b)[0] || near(a)[1] - near(b)[1]);
    return lines[0] ?? now;
  }

  // Select a key of the panes; `place` is its position as the kernel has it.
  pick(key) {
    this.key = key;
    this.paint();
  }

  get place() {
    return this.key === null ? null : (this.panes.map((pane) => pane.recorded.about.positions[this.key]).find((one) => one !== undefined) ?? null);
  }

  paint() {
    clearTimeout(this.dimming);
    const late = this.panes.some((pane, i) => !pane.recorded.known_steps.has(this.steps()[i]));
    if (late) this.dimming = setTimeout(() => this.control("panes").classList.add("late"), LATE);
    super.paint();
    if (late) return;
    this.control("panes").classList.remove("late");
    for (const pane of this.panes) this.markChanges(pane);
    this.paintHand();
    this.tell();
    this.askAgain();
  }

  markChanges(pane) {
    const changes = pane.side === "twin" ? this.model.get("_changes") : [];
    const { positions } = pane.recorded.about;
    const gone = new Set(changes.filter(({ kind }) => kind === "key").map(({ position }) => position));
    const planted = new Set(changes.filter(({ kind, step }) => kind === "edit" && step === pane.step).map(({ position }) => position));
    pane.cellOf.forEach((cell, key) => {
      cell.classList.toggle("picked", key === this.key);
      cell.classList.toggle("gone", gone.has(positions[key]));
      cell.classList.toggle("planted", planted.has(positions[key]));
      cell.setAttribute("aria-selected", String(key === this.key));
      cell.tabIndex = key === (this.key ?? 0) ? 0 : -1;
      const words = [cell.title.split("\n")[0], gone.has(positions[key]) ? "hidden" : "", cell.classList.contains("differs") ? "differs from the run" : ""];
      cell.setAttribute("aria-label", words.filter(Boolean).join(", "));
    });
    if (this.state.level === "head") this.crossHeads(pane, changes.filter(({ kind }) => kind === "head"));
  }

  crossHeads(pane, heads) {
    const { about } = pane.recorded;
    const { width, height } = gridShape(pane);
    const pen = pane.grid.getContext("2d");
    pen.strokeStyle = this.look.css("--text");
    pen.lineWidth = 2;
    for (const { layer, head } of heads) {
      const [x, y] = [GRID_LEFT + about.heads.indexOf(head) * width, GRID_TOP + about.layers.indexOf(layer) * height];
      pen.beginPath();
      pen.moveTo(x + 2, y + 2);
      pen.lineTo(x + width - 2, y + height - 2);
      pen.moveTo(x + width - 2, y + 2);
      pen.lineTo(x + 2, y + height - 2);
      pen.stroke();
    }
  }

  // The selection as the kernel has it: indices of the model.
  selected() {
    const { about } = this.panes[0].recorded;
    const { step, layer, head } = this.state;
    return { step, layer: about.layers[layer] ?? layer, head: about.heads[head] ?? head, position: this.place };
  }

  // Tell the kernel what is selected, once it has not changed for a moment.
  tell() {
    clearTimeout(this.telling);
    this.telling = setTimeout(() => {
      const selected = this.selected();
      const text = JSON.stringify(selected);
      if (text === JSON.stringify(this.model.get("_selection"))) return;
      this.sent = [...this.sent.slice(-20), text];
      this.kernel.ask({ kind: "select", ...selected }).catch(() => this.isEcho(text));
    }, 120);
  }

  // Whether the page has told this selection; its echo comes once, after which an equal one is Python's.
  isEcho(text) {
    const at = this.sent.indexOf(text);
    if (at >= 0) this.sent.splice(at, 1);
    return at >= 0;
  }

  // Python has set the selection, unless it is the echo of what was told.
  takeSelection() {
    const given = this.model.get("_selection");
    const { step, layer, head, position } = given;
    if (!this.panes.length || this.isEcho(JSON.stringify({ step, layer, head, position }))) return;
    this.take_(given, this.panes[0].recorded);
    this.paint();
  }

  take_({ step, layer, head, position }, { about }) {
    this.sent = [];
    const places = [about.layers.indexOf(layer), about.heads.indexOf(head)].map((place) => Math.max(place, 0));
    Object.assign(this.state, { step: Math.min(step, about.steps.length - 1), layer: places[0], head: places[1] });
    const key = about.positions.indexOf(position);
    this.key = position === null || key < 0 ? null : key;
  }

  paintHand() {
    const [pane] = this.panes;
    const { recorded, step } = pane;
    const none = this.place === null;
    const name = this.control("position_name");
    if (none) name.textContent = "No token selected: click one, or move there with the arrow keys.";
    else {
      const where = this.place < 0 ? `learned ${recorded.place(this.key)}` : `position ${this.place}`;
      const inside = this.key < recorded.keys;
      name.replaceChildren("Selected: ", make("strong", "", where), ...(inside ? [' ("', token(recorded.text(step, this.key), 24), `"), ${stateOf(pane, this.key)} at step ${recorded.about.steps[step]}`] : []));
    }
    const changes = this.model.get("_changes");
    const hidden = changes.some(({ kind, position }) => kind === "key" && position === this.place);
    const { layer, head } = this.selected();
    const cut = changes.some((one) => one.kind === "head" && one.layer === layer && one.head === head);
    this.control("hide_key").textContent = hidden ? "Show this key again" : "Hide this key";
    this.control("hide_head").textContent = cut ? "Give this head back" : "Hide this head";
    this.control("head_name").replaceChildren("Selected: ", make("strong", "", `layer ${layer}, head ${head}`));
    const busy = Boolean(this.model.get("_busy").what);
    this.control("hide_key").disabled = none || busy;
    this.control("hide_head").disabled = busy || this.state.level !== "head";
    const onCanvas = !none && this.place >= 0;
    for (const id of ["token", "plant"]) this.control(id).disabled = !onCanvas || busy;
    this.control("reopen").disabled = !onCanvas || busy || recorded.about.open !== "masked";
    this.control("reopen").hidden = recorded.about.open !== "masked";
    for (const id of ["undo", "clear"]) this.control(id).disabled = busy;
  }

  paintWork(slow = false) {
    const { done, of, ...busy } = this.model.get("_busy");
    const what = busy.what ?? (slow ? "waiting for the kernel: it runs something else, or has stopped" : "");
    this.control("working").hidden = !what;
    const bar = this.control("bar");
    if (of) Object.assign(bar, { max: of, value: done });
    else bar.removeAttribute("value");
    this.control("work").textContent = what ? `${what}${of ? `: step ${done} of ${of}` : " ..."}` : "";
    if (this.panes.length) this.paintHand();
  }

  paintProblem() {
    const problem = this.model.get("_problem");
    this.control("problem").hidden = !problem;
    this.control("problem").textContent = problem;
  }

  paintChanges() {
    const changes = this.model.get("_changes");
    this.control("changed").hidden = !changes.length;
    this.control("changes").replaceChildren(...changes.map((change, index) => {
      const line = make("li");
      line.append(...this.changeText(change));
      const back = make("button", "", "Take back");
      back.type = "button";
      back.setAttribute("aria-label", `Take back: ${line.textContent}`);
      back.addEventListener("click", () => this.change({ kind: "remove", index }));
      line.append(back);
      return line;
    }));
    this.control("summary").textContent = this.model.get("_summary");
    this.control("code").textContent = this.model.get("_code");
    if (this.panes.length && this.state.rule) this.paintHand();
  }

  changeText({ kind, layer, head, position, step, text }) {
    if (kind === "head") return [`layer ${layer}, head ${head} hidden (its output is zero)`];
    const place = position < 0 ? `learned sink token ${-1 - position}` : `position ${position}`;
    if (kind === "key") return [`${place}`, ...(text ? [' ("', token(text, 24), '")'] : []), " hidden from every query"];
    return [`"`, token(text, 24), `" at ${place} from step ${step} on`];
  }

  // A change: the kernel runs the twin, and says so. What fails is at the alert.
  change(request) {
    this.play(false);
    this.control("problem").hidden = true;
    this.kernel.ask(request).then(
      () => this.say(this.model.get("_summary") || "The changes are taken back."),
      () => this.paintProblem(),
    );
  }

  hideKey() {
    if (this.place !== null) this.change({ kind: "key", position: this.place });
  }

  hideHead() {
    const { layer, head } = this.selected();
    if (this.state.level === "head") this.change({ kind: "head", layer, head });
  }

  listenHand() {
    const click = (id, act) => this.control(id).addEventListener("click", act);
    const edited = () => ({ step: this.panes[0].recorded.about.steps[this.state.step], position: this.place });
    const plant = () => this.change({ kind: "plant", ...edited(), token: this.control("token").value });
    click("hide_key", () => this.hideKey());
    click("hide_head", () => this.hideHead());
    click("plant", plant);
    this.control("token").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !this.control("plant").disabled) plant();
    });
    click("reopen", () => this.change({ kind: "open", ...edited() }));
    click("undo", () => this.change({ kind: "undo" }));
    click("clear", () => this.change({ kind: "clear" }));
    this.control("prompt").addEventListener("change", (event) => this.change({ kind: "row", row: Number(event.target.value) }));
    for (const what of ["lens", "pattern"]) {
      click(`${what}_on`, () => {
        this.on[what] = !this.on[what];
        this.control(`${what}_on`).setAttribute("aria-pressed", String(this.on[what]));
        this.askAgain();
      });
    }
    click("copy", async () => {
      const text = this.control("code").textContent;
      try {
        await navigator.clipboard.writeText(text);
        this.say("Copied.");
        this.control("copy").textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(this.control("code"));
        this.control("copy").textContent = "Selected: copy with Ctrl+C";
      }
      setTimeout(() => { this.control("copy").textContent = "Copy"; }, 2000);
    });
  }

  // Ask for lens and pattern of the selection, when it has settled and nothing plays.
  askAgain() {
    clearTimeout(this.asking);
    for (const pane of this.panes) {
      pane.root.querySelector(".lenspart").hidden = !this.on.lens;
      pane.root.querySelector(".patternpart").hidden = !this.on.pattern;
    }
    if (this.state.timer !== null) return;
    this.asking = setTimeout(() => this.panes.forEach((pane) => {
      if (this.on.lens) this.askLens(pane);
      if (this.on.pattern) this.askPattern(pane);
    }), SETTLED);
  }

  about(pane) {
    const { recorded } = pane;
    return { side: recorded.side, version: recorded.version, step: pane.step };
  }

  async askLens(pane) {
    const note = pane.root.querySelector(".lensnote");
    const position = pane.recorded.about.positions[this.key];
    const request = { kind: "lens", ...this.about(pane), position };
    const wanted = JSON.stringify([request, this.look.theme]);
    if (pane.lensOf === wanted) return;
    pane.lensOf = wanted;
    pane.root.querySelector(".lensof").textContent = position === undefined ? "" : `at ${pane.recorded.place(this.key)}, step ${pane.step}`;
    if (position === undefined) {
      pane.root.querySelector("table.lens").tBodies[0].replaceChildren();
      note.textContent = "Select a token.";
      return;
    }
    note.textContent = "The kernel computes ...";
    try {
      const answer = await this.kernel.ask(request);
      if (answer && pane.lensOf === wanted) paintLens(pane, answer);
    } catch (error) {
      if (pane.lensOf !== wanted) return;
      // The next picture asks for it again.
      pane.lensOf = null;
      pane.root.querySelector("table.lens").tBodies[0].replaceChildren();
      note.textContent = error.message;
    }
  }

  async askPattern(pane) {
    const { layer, head } = this.selected();
    const request = { kind: "pattern", ...this.about(pane), layer, head };
    const wanted = JSON.stringify(request);
    pane.root.querySelector(".patternof").textContent = `of layer ${layer}, head ${head}, step ${pane.step}`;
    if (pane.patternOf === wanted) {
      if (pane.shownPattern) paintPattern(pane, pane.shownPattern);
      return;
    }
    pane.patternOf = wanted;
    try {
      const answer = await this.kernel.ask(request);
      if (!answer || pane.patternOf !== wanted) return;
      const values = await unpacked(answer.values);
      let largest = 1e-9;
      for (const value of values) if (value > largest) largest = value;
      pane.shownPattern = { queries: answer.queries, keys: answer.keys, values, largest, pair: pane.shownPattern?.pair ?? null };
      paintPattern(pane, pane.shownPattern);
    } catch (error) {
      if (pane.patternOf !== wanted) return;
      [pane.patternOf, pane.shownPattern] = [null, null];
      clearPattern(pane, error.message);
    }
  }
}

function render({ model, el }) {
  const host = make("div");
  // JupyterLab's shortcuts are for cells; a letter typed here is none.
  el.dataset.lmSuppressShortcuts = "true";
  host.dataset.lmSuppressShortcuts = "true";
  el.append(host);
  const root = host.attachShadow({ mode: "open" });
  const parts = document.createElement("template");
  parts.innerHTML = `<style>${STYLE}</style>${BODY}${OWN}`;
  root.append(parts.content);
  const control = (id) => root.getElementById(id);
  control("controls").after(control("hand"));
  control("panes").after(control("codepart"), control("keyhelp"));
  host.addEventListener("keydown", (event) => event.stopPropagation());
  const page = new ExplorerPage(root, host, model);
  host.dlmLens = { page, sinksAt }; // for tests
  page.begin().catch((error) => {
    control("problem").textContent = `This explorer cannot be shown: ${error.message}`;
    control("problem").hidden = false;
  });
  return () => page.leave();
}

export default { render };
