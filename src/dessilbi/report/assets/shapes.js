// Bars, widths and boxes: one mark a layer, moved by the slider.

// How much of every layer is selected at the moment.
function keepBars(view) {
  const { run } = view;
  const rows = run.layers.map(layer => {
    const bar = el("span", { class: "bar", "aria-hidden": "true" }, el("span", {}));
    const [kept, share] = [el("td", { class: "number" }), el("td", { class: "number" })];
    view.moving.push(k => {
      const part = layer.kept[k] / layer.groups;
      bar.firstChild.style.transform = `scaleX(${part})`;
      tell(kept, whole(layer.kept[k]));
      tell(share, percent(part, 1));
    });
    return el("tr", {}, el("th", { scope: "row" }, shown(layer.name)), kept, el("td", { class: "number" }, whole(layer.groups)), share,
      el("td", { class: "bars" }, bar));
  });
  // The bars stand last: a copied row then ends with its numbers.
  const head = [...["layer", "selected", "of", "keep"].map((h, i) => el("th", { scope: "col", class: i > 0 && "number" }, h)), el("td", { class: "bars" })];
  return figure("Keep ratio by layer", {
    id: "keep", name: `${run.name}-keep`,
    rows: () => [["epoch", "time", ...run.layers.map(l => l.name)],
      ...view.moments.epoch.map((e, k) => [e, view.moments.time[k], ...run.layers.map(l => l.kept[k] / l.groups)])],
    tableRows: () => [["layer", "kind", "groups", "selected", "keep", "parameters", "parameters selected"], ...run.layers.map(l => {
      const part = l.kept[view.k()] / l.groups;
      return [l.name, l.kind, l.groups, l.kept[view.k()], percent(part), l.parameters, Math.round(part * l.parameters)];
    })],
  }, scrolling("Keep ratio by layer", el("table", { class: "keeps" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows))));
}

// The selected network inside the dense one: a column a layer, as high as the layer is wide.
function widths(title, layers, options, at) {
  const count = layers.length, step = Math.max(13, Math.min(64, 500 / count)), high = 150, foot = 74, left = 44;
  const most = Math.max(...layers.map(l => l.width), 1), width = left + Math.ceil(count * step) + 8;
  const marks = [];
  const root = svg("svg", { class: "widths", viewBox: `0 0 ${width} ${high + foot}`, width, height: high + foot, role: "img", "aria-label": title });
  layers.forEach((layer, i) => {
    const x = left + i * step, h = Math.max(1.5, high * layer.width / most - 14), w = step * 0.74;
    const kept = svg("rect", { class: "kept", x, y: 0, width: w, height: high, rx: 2 });
    const text = svg("text", { class: "count", x: x + w / 2, "text-anchor": "middle" });
    const tip = svg("title", {});
    root.append(svg("g", {}, tip, svg("rect", { class: "dense", x, y: high - h, width: w, height: h, rx: 2 }), kept, text,
      svg("text", { class: "name", transform: `translate(${x + w / 2 + 3} ${high + 8}) rotate(-60)`, "text-anchor": "end" },
        count <= 30 ? clipped(shown(layer.name)) : i % 5 === 0 ? String(i + 1) : "")));
    marks.push((n) => {
      const tall = n ? Math.max(1.5, h * n / layer.width) : 0;
      kept.setAttribute("height", tall);
      kept.setAttribute("y", high - tall);
      text.setAttribute("y", high - h - 3);
      tell(text, step >= 20 ? (n ? short(n).replace(" ", "") : "×") : n ? "" : "×");
      tell(tip, `${layer.name}: ${whole(n)} of ${whole(layer.width)}${n ? "" : ", dropped"}`);
    });
  });
  const dropped = el("p", { class: "note", "aria-live": "off" });
  const draw = () => {
    const wide = layers.map(layer => Array.isArray(layer.wide) ? layer.wide[at()] : layer.wide), gone = layers.filter((_, i) => !wide[i]);
    marks.forEach((mark, i) => mark(wide[i]));
    tell(dropped, gone.length ? `Dropped: ${gone.map(layer => shown(layer.name)).join(", ")}.` : "No layer is dropped.");
  };
  draw();
  whileVisible(root, draw);
  return figure(title, options, scrolling(title, root), dropped);
}
const clipped = text => text.length > 13 ? `…${text.slice(-12)}` : text;

function structure(view) {
  const { run } = view, layers = run.layers;
  return widths("Structure: selected inside dense", layers, {
    id: "structure", name: `${run.name}-structure`,
    note: "A column a layer, as high as it is wide: light the dense network, dark what is selected; × where nothing is.",
    rows: () => [["epoch", "time", ...layers.map(l => l.name)], ["", "", ...layers.map(l => l.width)],
      ...view.moments.epoch.map((e, k) => [e, view.moments.time[k], ...layers.map(l => l.wide[k])])],
    tableRows: () => [["layer", "dense width", "selected width"], ...layers.map(l => [l.name, l.width, l.wide[view.k()] || "dropped"])],
  }, view.k);
}

const BOX = [0.05, 0.25, 0.5, 0.75, 0.95];

// Quantiles of a norm of a layer at a point; found once, as a slider comes by again.
function quantilesAt(layer, which, k, points, levels) {
  const found = (layer.boxes ??= { w: [], v: [] })[which];
  return found[k] ??= sortedQuantiles(layer, which, k, points, levels);
}
function sortedQuantiles(layer, which, k, points, levels) {
  const values = layer[which];
  if (layer.kind === "weight") return BOX.map(q => values[levels.indexOf(q) * points + k]);
  const sorted = Float32Array.from({ length: layer.groups }, (_, g) => values[g * points + k]).filter(known).sort();
  if (!sorted.length) return BOX.map(() => NaN);
  return BOX.map(q => {
    const at = q * (sorted.length - 1), low = Math.floor(at), high = Math.min(low + 1, sorted.length - 1);
    return sorted[low] + (at - low) * (sorted[high] - sorted[low]);
  });
}

// How a norm is distributed in every layer: 5, 25, 50, 75 and 95 %. `lam(k)` draws the threshold.
function boxes(title, { run, points, quantiles, note, which, id, k, lam }) {
  const layers = run.layers, count = layers.length, step = Math.max(13, Math.min(64, 500 / count));
  const high = 160, foot = 74, left = 44, width = left + Math.ceil(count * step) + 8;
  const root = svg("svg", { class: "boxes", viewBox: `0 0 ${width} ${high + foot}`, width, height: high + foot, role: "img", "aria-label": title });
  const ready = () => Promise.all(layers.map(l => unpack(l, points, quantiles.length)));
  const line = lam ? svg("line", { class: "threshold", x1: left, x2: width }) : null;
  const marks = layers.map((layer, i) => {
    const x = left + i * step, w = step * 0.66, mid = x + w / 2;
    const parts = {
      stem: svg("line", { class: "stem", x1: mid, x2: mid }), box: svg("rect", { class: "box", x, width: w, rx: 2 }),
      median: svg("line", { class: "median", x1: x, x2: x + w }), tip: svg("title", {}),
    };
    root.append(svg("g", {}, parts.tip, parts.stem, parts.box, parts.median,
      svg("text", { class: "name", transform: `translate(${mid + 3} ${high + 8}) rotate(-60)`, "text-anchor": "end" },
        count <= 30 ? clipped(shown(layer.name)) : i % 5 === 0 ? String(i + 1) : "")));
    return parts;
  });
  let top = 0, drawn = false;
  const y = value => high - 4 - (high - 14) * Math.min(value || 0, top) / top;
  const draw = () => {
    if (!drawn) return;
    const at = k();
    layers.forEach((layer, i) => {
      const [a, b, c, d, e] = quantilesAt(layer, which, at, points, quantiles), p = marks[i];
      p.stem.setAttribute("y1", y(a)); p.stem.setAttribute("y2", y(e));
      p.box.setAttribute("y", y(d)); p.box.setAttribute("height", Math.max(0.5, y(b) - y(d)));
      p.median.setAttribute("y1", y(c)); p.median.setAttribute("y2", y(c));
      tell(p.tip, `${layer.name}: median ${number(c)}, middle half ${number(b)} to ${number(d)}`);
    });
    if (line) {
      const value = lam(at), there = known(value) && value <= top;
      line.setAttribute("visibility", there ? "visible" : "hidden");
      if (there) { line.setAttribute("y1", y(value)); line.setAttribute("y2", y(value)); }
    }
  };
  ready().then(() => {
    // One scale for all moments, so that what moves is the data.
    const looked = new Set([points - 1]);
    for (let q = 0; q < points; q += Math.max(1, points >> 4)) looked.add(q);
    for (const q of looked) for (const l of layers) top = Math.max(top, quantilesAt(l, which, q, points, quantiles)[4] || 0);
    top ||= 1;
    for (const tick of roundNumbers(top)) {
      root.prepend(svg("line", { class: "grid", x1: left, x2: width, y1: y(tick), y2: y(tick) }),
        svg("text", { class: "tick", x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, number(tick, 3)));
    }
    if (line) root.append(line);
    drawn = true;
    draw();
  });
  whileVisible(root, draw);
  return figure(title, {
    id, note, ready, name: `${run.name}-${id}`,
    rows: () => [["layer", "epoch", "5 %", "25 %", "50 %", "75 %", "95 %"], ...layers.flatMap(l => Array.from({ length: points }, (_, at) =>
      [l.name, run.points.point[at], ...quantilesAt(l, which, at, points, quantiles).map(rounded)]))],
    tableRows: () => [["layer", "5 %", "25 %", "50 %", "75 %", "95 %"], ...layers.map(l =>
      [l.name, ...quantilesAt(l, which, k(), points, quantiles).map(rounded)])],
  }, scrolling(title, root));
}

// Round numbers from zero to the top.
function roundNumbers(top) {
  const raw = top / 4, unit = 10 ** Math.floor(Math.log10(raw));
  const step = unit * [1, 2, 2.5, 5, 10].find(m => m * unit >= raw);
  return Array.from({ length: Math.floor(top / step) + 1 }, (_, i) => i * step);
}
