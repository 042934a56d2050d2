// The part of the page that shows one recording; a comparison has two.

// The place of a layer or head by its number in the model; of one that was not recorded, that of the nearest.
function placeOf(numbers, wanted, count) {
  if (count === 1 || numbers.length !== count) return Math.min(wanted, count - 1);
  const distances = numbers.map((number) => Math.abs(number - wanted));
  return distances.indexOf(Math.min(...distances));
}

class Pane {
  // `page` is what shows the pane (page.js).
  constructor(page, recorded, label, { alone = true } = {}) {
    Object.assign(this, { page, recorded, look: page.look });
    this.root = page.control("pane").content.firstElementChild.cloneNode(true);
    const find = (name) => this.root.querySelector(name);
    this.cells = find(".cells");
    this.grid = find("canvas.grid");
    this.path = find("canvas.path");
    this.summary = find(".summary");
    this.gridColour = find(".gridcolour");
    this.listing = find(".listing");
    this.more = find(".more");
    this.lines = LINES;
    this.step = 0;
    find(".label").textContent = label;
    find("h2").hidden = alone;
    find(".about").textContent = aboutText(recorded);
    buildCells(this);
    paintFacts(this);
    this.listen();
  }

  listen() {
    this.gridColour.addEventListener("change", () => this.page.paint());
    this.listing.addEventListener("change", () => {
      this.lines = LINES;
      this.page.paint();
    });
    this.more.addEventListener("click", () => {
      this.lines += 4 * LINES;
      this.page.paint();
    });
    this.grid.addEventListener("click", (event) => {
      const place = gridAt(this, event);
      if (place) this.choose(...place);
    });
    this.grid.addEventListener("keydown", (event) => {
      const place = gridMove(this, event.key);
      if (!place) return;
      event.preventDefault();
      event.stopPropagation();
      this.choose(...place);
      this.page.say(this.grid.getAttribute("aria-label"));
    });
    this.path.addEventListener("click", (event) => {
      const step = pathAt(this, event);
      if (step !== null) this.page.goTo(this, step);
    });
  }

  choose(layer, head) {
    const { layers, heads } = this.recorded.about;
    this.page.choose(layers[layer] ?? layer, heads[head] ?? head);
  }

  // Take over the state of the page, at a step of this recording.
  take(state, step) {
    this.step = step;
    this.level = state.level;
    this.size = this.recorded.level(state.level);
    const { layers, heads } = this.recorded.about;
    this.chosen = [placeOf(layers, state.layer, this.size.layers), placeOf(heads, state.head, this.size.heads)];
    this.pattern = this.recorded.pattern(state.level, ...this.chosen);
    countSinks(this, state);
  }

  // The widths that pictures may have; read before anything is written, so that a paint needs no second layout.
  measure() {
    this.rooms = { grid: this.grid.parentElement.clientWidth, path: this.path.parentElement.clientWidth };
  }

  paint(state, other) {
    const { about } = this.recorded;
    const written = `${Math.round(100 * about.progress[this.step])}% decoded`;
    this.root.querySelector(".when").textContent = `at step ${about.steps[this.step]}, ${written}`;
    this.root.querySelector(".colours").textContent = `Colour: attention that each token receives in ${patternText(this)}.`;
    for (const which of this.root.querySelectorAll(".which")) which.textContent = `of ${patternText(this)}`;
    this.root.querySelector(".unwritten").textContent = about.open;
    paintLegend(this.look, this.root.querySelector(".legend"), about);
    paintCells(this, state, other);
    paintGrid(this, state);
    paintPath(this, state);
    paintStrongest(this, state);
    paintSinks(this, state);
  }
}
