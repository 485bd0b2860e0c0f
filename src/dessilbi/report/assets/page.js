// The page: a run, its slider, and what moves with it.

const page = { data: null, run: 0, k: null, axis: "epoch", view: null };

function viewOf(run) {
  const moments = momentsOf(run), metrics = run.metrics;
  const ends = metrics.epoch ?? [];
  const view = {
    run, moments, points: run.points.point?.length ?? 0, quantiles: page.data.quantiles,
    moving: [], settled: [],
    k: () => page.k,
    along: () => page.axis === "time" && moments.time.some(known) ? "time" : "epoch",
    x: () => run.points[view.along() === "time" ? "time" : "point"],
    metricsX: () => view.along() === "time" && metrics.time ? metrics.time : ends,
    clock: () => moments[view.along()][page.k] ?? 0,
    // The line of metrics.jsonl that is known at a moment: of the last epoch that has ended.
    index: (from, k) => from === "points" ? k : ends.findLastIndex(e => e <= moments.epoch[k]),
    pick: x => {
      const xs = moments[view.along()];
      move(xs.reduce((best, value, k) => Math.abs(value - x) < Math.abs(xs[best] - x) ? k : best, 0), true);
    },
    fanTop: (layer, which) => layer.w ? layer[which].slice(9 * view.points).reduce((a, b, i) => i < view.points && b > a ? b : a, 0) : layer.tops[which],
  };
  return view;
}

// Move everything to a moment.
function move(k, settle) {
  const { view } = page, { moments } = view;
  page.k = Math.max(0, Math.min(moments.count - 1, k));
  const slider = document.getElementById("moment");
  slider.value = page.k;
  slider.setAttribute("aria-valuetext", READOUTS.filter(([name]) => known(moments[name][page.k])).map(([name, label]) => `${label} ${said(name, moments[name][page.k])}`).join(", "));
  for (const f of view.moving) f(page.k);
  for (const mover of onScreen.values()) if (mover.on) mover.draw();
  if (settle) for (const f of view.settled) f(page.k);
}

function controls(view) {
  const { moments, run } = view, outs = {};
  const slider = el("input", { id: "moment", type: "range", min: 0, max: moments.count - 1, step: 1, value: page.k, "aria-label": "Moment of the path",
    oninput: event => move(Number(event.target.value)), onchange: event => move(Number(event.target.value), true) });
  const values = READOUTS.filter(([name]) => moments[name].some(known)).map(([name, label]) => {
    outs[name] = el("output", { for: "moment", "aria-live": "off", id: `now-${name}` });
    return el("div", {}, el("dt", {}, label), el("dd", {}, outs[name]));
  });
  view.moving.push(k => { for (const [name, out] of Object.entries(outs)) tell(out, said(name, moments[name][k])); });
  const axes = run.points.time?.some(known) ? el("fieldset", { class: "axes" }, el("legend", {}, "along"), ["epoch", "time"].map(name => el("label", {},
    el("input", { type: "radio", name: "axis", value: name, checked: page.axis === name, onchange: () => { page.axis = name; for (const c of charts) c.again(); } }),
    name === "epoch" ? "epochs" : "path time"))) : null;
  return el("div", { class: "controls", role: "group", "aria-label": "Moment of the path" },
    el("div", { class: "row" }, slider, axes), el("dl", { class: "now" }, values));
}

function heading(run) {
  const c = run.config, facts = [];
  if (c.model) facts.push(`${c.model} on ${c.data}`, c.optimizer);
  if (run.status) facts.push(run.status);
  if (run.metrics.epoch?.length) facts.push(`${run.metrics.epoch.at(-1)} of ${c.epochs} epochs`);
  if (run.layers.length) facts.push(`${whole(run.layers.reduce((s, l) => s + l.groups, 0))} groups in ${run.layers.length} layers`, `${run.points.point.length} points`);
  return el("p", { class: "facts" }, facts.map(f => el("span", {}, f)));
}

// Everything that belongs to the run in view.
function showRun() {
  for (const chart of [...charts]) if (!chart.lasting) chart.remove();
  for (const element of [...onScreen.keys()]) if (!element.closest("#compared")) forget(element);
  const run = page.data.runs[page.run], place = document.getElementById("run");
  if (!run) return;
  const view = page.view = viewOf(run), last = view.moments.count - 1;
  page.k = page.k === null ? last : Math.min(page.k, last);
  const sections = [growth(view), solutionPath(view), selectedNetwork(view), training(view), pruning(view), provenance(view)].filter(Boolean);
  const empty = view.moments.count ? null : el("p", { class: "lead" }, "Nothing is recorded yet: the figures come with the first epoch.");
  place.replaceChildren(heading(run), ...(empty ? [empty] : [controls(view)]), ...sections);
  contentsOf();
  if (!empty) move(page.k, true);
}

// The list of sections, made of their headings.
function contentsOf() {
  const links = [...document.querySelectorAll("main h2")].map(h => el("li", {}, el("a", { href: `#${h.parentElement.id}` }, h.textContent)));
  document.getElementById("contents").replaceChildren(...links);
}

function build() {
  for (const chart of [...charts]) chart.remove();
  for (const element of [...onScreen.keys()]) forget(element);
  const { data } = page, many = data.runs.length > 1;
  const names = [...data.runs, ...data.comparisons].map(r => r.name);
  const choice = many ? el("label", { class: "choice" }, "One run ", el("select", { id: "which", onchange: event => { page.run = Number(event.target.value); page.k = null; showRun(); } },
    data.runs.map((r, i) => el("option", { value: i, selected: i === page.run }, r.name)))) : null;
  document.body.replaceChildren(
    el("a", { class: "skip", href: "#main" }, "Skip to the figures"),
    el("header", {}, el("p", { class: "brand" }, "dessilbi"), el("h1", {}, names.join(", ")),
      data.live ? el("p", { id: "live", role: "status", class: "note" }, STATUS.true) : "",
      el("nav", { "aria-label": "Sections" }, el("ul", { id: "contents" }))),
    el("main", { id: "main" }, el("div", { id: "compared" }, comparisonOfRuns(data), data.comparisons.map(tickets)), choice, el("div", { id: "run" })),
    el("footer", {}, `Made with dessilbi ${data.version}, ${data.made}. Norms are rounded to 1/4095 of the largest of their layer. `,
      "Charts: uPlot (MIT). This page asks nothing of the network."));
  showRun();
  contentsOf();
}

// Build anew, and leave the reader where she is: the place, the focus, the open tables.
function rebuild() {
  const top = scrollY, held = document.activeElement?.id, tables = "details [aria-label]";
  const open = new Set([...document.querySelectorAll(tables)].filter(e => e.parentElement.open).map(e => e.getAttribute("aria-label")));
  build();
  for (const e of document.querySelectorAll(tables)) e.parentElement.open = open.has(e.getAttribute("aria-label"));
  if (held) document.getElementById(held)?.focus({ preventScroll: true });
  scrollTo(0, top);
}

const STATUS = { true: "Live: epochs appear as they end.", false: "The server does not answer: this is what was last heard. Start dessilbi watch again and reload." };
const status = answers => { document.getElementById("live").textContent = STATUS[answers]; };

// A live page asks its server for what is new, and stays at its moment unless that was the newest.
async function follow() {
  let seen = page.data.version_of_data;
  for (;;) {
    await new Promise(done => setTimeout(done, 1000));
    try {
      const answer = await fetch(`data.json?after=${encodeURIComponent(seen)}`);
      status(true);
      if (answer.status !== 200) continue;
      const fresh = await answer.json(), newest = page.view && page.k === page.view.moments.count - 1;
      seen = fresh.version_of_data;
      page.data = { ...page.data, ...fresh };
      if (newest) page.k = null;
      rebuild();
    } catch {
      status(false);
    }
  }
}

readColours();
page.data = JSON.parse(document.getElementById("data").textContent);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); for (const c of charts) c.again(); });
addEventListener("beforeprint", () => { for (const c of charts) c.mount(); });
build();
performance.mark("interactive");
if (page.data.live) follow();
