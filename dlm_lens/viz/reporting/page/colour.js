// Colours of scores, on a logarithmic scale from half of uniform attention to the highest score of the page.

const RAMPS = {
  // High scores are dark on a light background and bright on a dark one.
  light: ["#ffffff", "#fff3d6", "#fed98e", "#fe9929", "#d95f0e", "#993404", "#5c1a02"],
  dark: ["#16181d", "#2d1b4e", "#5b2a86", "#9c3a7c", "#d9575b", "#f59a4d", "#fbe38e"],
};
const LOWEST = 0.5;

const POSITIONS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c7a00", "#7a5195"];

function mix(ramp, t) {
  const at = Math.min(Math.max(t, 0), 1) * (ramp.length - 1);
  const low = Math.min(Math.floor(at), ramp.length - 2);
  const channel = (i) => {
    const [a, b] = [ramp[low], ramp[low + 1]].map((c) => parseInt(c.slice(i, i + 2), 16));
    return Math.round(a + (b - a) * (at - low));
  };
  return [channel(1), channel(3), channel(5)];
}

// Lightness of a colour, 0 to 1.
function lightness(rgb) {
  const [r, g, b] = rgb.map((c) => (c / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// The theme of a page, and the score at the end of its colour scale. `host` is the element that has the custom
// properties of the style sheet and the theme.
class Look {
  constructor(host) {
    Object.assign(this, { host, theme: "light", highest: 4, values: new Map() });
  }

  take(theme) {
    this.theme = theme;
    this.host.dataset.theme = theme;
    this.values.clear();
  }

  // A custom property; read once a theme, since a paint needs some of them thousands of times.
  css(name) {
    if (!this.values.has(name)) this.values.set(name, getComputedStyle(this.host).getPropertyValue(name).trim());
    return this.values.get(name);
  }

  get ramp() {
    return RAMPS[this.theme];
  }

  share(score) {
    return Math.log2(Math.max(score, LOWEST) / LOWEST) / Math.log2(this.highest / LOWEST);
  }

  rgb(score) {
    return mix(this.ramp, this.share(score));
  }

  // Background and text colour of a score.
  colours(score) {
    const rgb = this.rgb(score);
    return { ground: `rgb(${rgb.join(" ")})`, ink: lightness(rgb) > 0.19 ? "#000000" : "#ffffff" };
  }
}

// The score by which a bin is coloured: its middle on the logarithmic scale.
function middle([low, high]) {
  return low > 0 ? Math.sqrt(low * high) : high / 2;
}

// Size a canvas element in device pixels, to be drawn on in CSS pixels.
function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

function paintLegend(look, root, { scale, open, undefined_keys: undefinedKeys, revised }) {
  root.replaceChildren();
  const bar = make("span", "bar");
  bar.style.background = `linear-gradient(to right, ${look.ramp.join(", ")})`;
  root.append(make("span", "", `${LOWEST} or less`), bar, make("span", "", number(look.highest)));
  root.append(make("span", "grow", `received attention, ${scale}${scale === "relative to uniform" ? " (1 = uniform)" : ""}`));
  root.append(make("span", "key sinkkey", "sink"), make("span", "key maskkey", open));
  root.append(make("span", "key writtenkey", "decoded at this step"));
  if (revised) root.append(make("span", "key revisedkey", `rewritten or ${open} again at this step`));
  if (undefinedKeys) root.append(make("span", "key undefinedkey", "no score"));
}
