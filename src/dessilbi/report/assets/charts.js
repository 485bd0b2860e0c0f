// Line charts on uPlot. A chart is drawn when it comes near the screen, and once: the slider moves a veil over it.

const COLOURS = ["ink", "muted", "rule", "card", "blue", "orange", "sky", "violet", "grey", "gold"];
// Told apart by lightness and dashes as well: no two differ only in red against green.
const SERIES = [["blue", []], ["orange", []], ["violet", [8, 3]], ["sky", [2, 3]], ["gold", [8, 3, 2, 3]], ["ink", [4, 2]],
  ["blue", [14, 4]], ["orange", [14, 4]], ["violet", [1, 4]], ["gold", [1, 4]], ["sky", [14, 3, 1, 3]], ["ink", [2, 8]]];
let colours = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  colours = Object.fromEntries(COLOURS.map(name => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// The colour of a line; with a shade from 0 to 1, so far from the background.
function strokeOf(s) {
  if (s.shade === undefined) return colours[s.colour];
  const [from, to] = [colours.grey, colours.ink].map(c => [1, 3, 5].map(i => parseInt(c.slice(i, i + 2), 16)));
  return `rgb(${from.map((c, i) => Math.round(c + (to[i] - c) * s.shade)).join(" ")})`;
}

const FONT = '11px Inter, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const charts = new Set();
const nearby = new IntersectionObserver(entries => {
  for (const e of entries) if (e.isIntersecting) e.target.chart.mount();
}, { rootMargin: "250px" });
// What moves with the slider is drawn while it is on the screen, and again when it comes there.
const onScreen = new Map();
const visible = new IntersectionObserver(entries => {
  for (const e of entries) {
    const mover = onScreen.get(e.target);
    if (mover && (mover.on = e.isIntersecting)) mover.draw();
  }
});
function whileVisible(element, draw) {
  const mover = { on: false, draw };
  onScreen.set(element, mover);
  visible.observe(element);
}
function forget(element) {
  onScreen.delete(element);
  visible.unobserve(element);
}
const resized = new ResizeObserver(entries => {
  for (const e of entries) e.target.chart.resize();
});

class Chart {
  // label: what the figure shows, in words. x(): the numbers along; xTicks: those of a logarithmic axis; xRange: what else
  // than the first to the last; xText(number): how they are written.
  // series: [{label, values, colour, dash}]. y: {range, percent}. clock(): where the slider is along x. before(): what
  // must be there for paint(plot), which draws over the axes. pick(x): someone clicked there.
  // lasting: belongs to the page and not to the run in view.
  constructor({ label, height = 170, x, xTicks, xRange, xText, series = [], y = {}, clock, paint, before, pick, lasting = false }) {
    Object.assign(this, { label, height, x, xTicks, xRange, xText, series, y, clock, paint, before, pick, lasting, plot: null });
    this.host = el("div", { class: "plot", role: "img", "aria-label": label });
    this.host.style.height = `${height}px`;
    this.host.chart = this;
    charts.add(this);
    nearby.observe(this.host);
    resized.observe(this.host);
    if (clock) whileVisible(this.host, () => this.at());
  }

  async mount() {
    if (this.plot || !this.host.clientWidth) return;
    const veil = this.clock ? el("div", { class: "veil" }) : null;
    const axis = { stroke: colours.muted, font: FONT, grid: { stroke: colours.rule, width: 1 }, ticks: { show: false } };
    const asPercents = (_, ticks) => ticks.map(t => t === null ? "" : `${Number((100 * t).toPrecision(4))} %`);
    const asNumbers = (_, ticks) => ticks.map(t => t === null ? "" : number(t));
    const along = this.xText ? (_, ticks) => ticks.map(t => t === null ? "" : this.xText(t)) : asNumbers;
    const log = this.xTicks && { splits: () => this.xTicks, filter: (_, ticks) => ticks, values: asPercents };
    this.plot = new uPlot({
      width: this.host.clientWidth,
      height: this.height,
      padding: [8, 14, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      select: { show: false },
      scales: {
        x: log ? { time: false, distr: 3, range: (_, low, high) => [low / 1.2, high * 1.2] }
          : { time: false, range: (_, low, high) => this.xRange ?? [low, high > low ? high : low + 1] },
        y: { range: this.y.range ?? padded },
      },
      axes: [
        { ...axis, size: 26, gap: 4, values: along, ...log },
        { ...axis, size: 50, gap: 4, space: 28, values: this.y.percent ? asPercents : asNumbers },
      ],
      series: [{}, ...this.series.map(s => ({
        label: s.label, stroke: s.hidden ? "transparent" : strokeOf(s), width: s.hidden ? 0 : 2, dash: s.dash,
        spanGaps: true, ...s.stepped && { paths: uPlot.paths.stepped({ align: 1 }) }, points: { show: s.points ?? false, size: 6, fill: colours[s.colour] },
      }))],
      hooks: { draw: [plot => { this.paint?.(plot); this.at(); }] },
    }, [this.x(), ...this.series.map(s => s.values)], this.host);
    if (veil) {
      this.plot.over.append(veil);
      this.veil = veil;
      this.plot.over.addEventListener("click", event => this.pick?.(this.plot.posToVal(event.offsetX, "x")));
    }
    if (this.before) {
      await this.before();
      this.plot?.redraw(false);
    }
  }

  // The veil covers what comes after the moment of the slider.
  at() {
    if (this.veil && known(this.plot.scales.x.min)) this.veil.style.transform = `translateX(${this.plot.valToPos(this.clock(), "x")}px)`;
  }

  resize() {
    if (!this.plot) return;
    const width = this.host.clientWidth;
    if (width && width !== this.plot.width) {
      this.plot.setSize({ width, height: this.height });
    }
  }

  unmount() {
    this.plot?.destroy();
    this.plot = this.veil = null;
  }

  // Draw again, in other colours or over another axis.
  again() {
    if (!this.plot) return;
    this.unmount();
    this.mount();
  }

  remove() {
    this.unmount();
    nearby.unobserve(this.host);
    resized.unobserve(this.host);
    forget(this.host);
    charts.delete(this);
  }
}

function padded(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

// The names of the lines, with their colours and dashes, and a place for their values at the moment.
function legend(series, readouts) {
  return el("ul", { class: "legend" }, series.map((s, i) => {
    const out = readouts ? el("output", { "aria-live": "off" }) : null;
    if (out) readouts[i] = out;
    const swatch = svg("svg", { viewBox: "0 0 32 8", width: 32, height: 8, "aria-hidden": "true" },
      svg("line", { x1: 0, x2: 32, y1: 4, y2: 4, class: s.shade === undefined ? `stroke-${s.colour}` : s.shade ? "stroke-ink" : "stroke-grey", "stroke-width": 3, "stroke-dasharray": (s.dash ?? []).join(" ") }));
    return el("li", {}, swatch, el("span", {}, s.label), out);
  }));
}
