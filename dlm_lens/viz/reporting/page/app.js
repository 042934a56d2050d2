// The report: a page whose recordings are in the file.

const page = new Page(document, document.documentElement);
let linkChosen = false; // by the reader, for all prompts

// The pattern with which the page starts: the one with the highest score at any step.
function strongestPattern(recorded) {
  const { about } = recorded;
  const { name, layers, heads } = about.levels[0];
  let best = [-1, 0, 0];
  for (let layer = 0; layer < layers; layer += 1) {
    for (let head = 0; head < heads; head += 1) {
      for (let step = 0; step < recorded.steps; step += 1) {
        const score = recorded.strongest(recorded.pattern(name, layer, head), step)[0]?.score ?? -1;
        if (score > best[0]) best = [score, layer, head];
      }
    }
  }
  const [, layer, head] = best;
  return [about.layers[layer] ?? layer, about.heads[head] ?? head];
}

// Show a prompt of the recording, or of both, in place of the current one.
async function show(data, index) {
  const recordings = await Promise.all(data.prompts[index].map((given) => Recorded.from(given)));
  page.take(recordings, data.recordings.map(({ label }) => label));
  if (!linkChosen) {
    page.state.link = new Set(recordings.map((recorded) => recorded.steps)).size > 1 ? "progress" : "step";
    page.control("link").value = page.state.link;
  }
  page.control("prompted").textContent = `prompt ${index + 1} of ${data.prompts.length}` +
    (recordings[0].about.rows > data.prompts.length ? ` (the recording has ${recordings[0].about.rows})` : "");
  // For the console and for tests.
  window.dlmLens = { page, state: page.state, panes: page.panes, sinksAt };
  return recordings;
}

// The stored rules that every recording of the file has.
function sharedRules(data) {
  const all = data.prompts.flat().map((given) => given.stored.map((rule) => rule.name));
  return all[0].filter((name) => all.every((names) => names.includes(name)));
}

function listPrompts(data) {
  const menu = page.control("prompt");
  page.control("prompts").hidden = data.prompts.length < 2;
  menu.append(...data.prompts.map(([first], i) => new Option(`row ${first.row}: ${visible(first.prompt_text)}`, i)));
  menu.addEventListener("change", async (event) => {
    page.play(false);
    await show(data, Number(event.target.value));
    page.paint();
    document.documentElement.dataset.prompt = event.target.value;
  });
}

// Paper is white: a page in dark colours is printed in light ones.
function printInLight() {
  let shown = null; // the theme before the print
  const turn = (theme) => {
    page.takeTheme(theme);
    page.paint();
  };
  window.addEventListener("beforeprint", () => {
    shown = page.look.theme;
    if (shown !== "light") turn("light");
  });
  window.addEventListener("afterprint", () => { if (shown !== null && shown !== page.look.theme) turn(shown); });
}

async function start() {
  const data = JSON.parse(page.control("data").textContent);
  data.prompts = [data.recordings, ...(data.others ?? [])];
  page.takeTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  page.control("theme").addEventListener("click", () => {
    page.takeTheme(page.look.theme === "light" ? "dark" : "light");
    page.paint();
  });
  printInLight();
  page.control("title").append(make("bdi", "", data.title || "Attention sinks"));
  const recordings = await show(data, 0);
  listPrompts(data);
  page.listRules(sharedRules(data));
  page.listLevels(recordings);
  [page.state.layer, page.state.head] = strongestPattern(recordings[0]);
  page.control("link").addEventListener("change", () => { linkChosen = true; });
  page.control("linking").hidden = recordings.length < 2;
  page.listen();
  page.takeRule(data.rule.name, data.rule.value);
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

start().catch((error) => {
  page.control("problem").textContent = `This report cannot be shown: ${error.message}`;
  page.control("problem").hidden = false;
  throw error;
});
