// Elements, numbers as text, tables, and data as CSV. Text only ever becomes text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function make(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined));
  return element;
}
const el = (tag, attributes, ...children) => make(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => make(document.createElementNS(SVG, tag), attributes, children);

// What says the same as before is left alone: nothing has to be laid out anew.
const tell = (element, text) => { if (element.textContent !== text) element.textContent = text; };

const known = value => typeof value === "number" && Number.isFinite(value);
// Four digits, and no more than are needed.
function number(value, digits = 4) {
  if (!known(value)) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-4)) return value.toExponential(digits - 2);
  return String(Number(value.toPrecision(digits)));
}
const percent = (value, digits = 2) => known(value) ? `${(100 * value).toFixed(digits)} %` : "–";
const whole = value => known(value) ? value.toLocaleString("en-US") : "–";
function short(value) {
  if (!known(value)) return "–";
  let i = 0;
  while (Math.abs(value) >= 999.5 && i < 3) { value /= 1000; i++; }
  return `${Number(value.toPrecision(3))}${["", " K", " M", " G"][i]}`;
}

// Rows of cells; numbers stand to the right. A first column of names is the heading of its row.
function table(headings, rows, caption) {
  const numeric = headings.map((_, i) => rows.every(r => /^(–|[-+−]?[\d.,e+-]+( ± [\d.]+)? ?[%×KMG]?( \+\d+)?)$/.test(`${r[i] ?? "–"}`)));
  return el("table", {},
    caption ? el("caption", {}, caption) : null,
    el("thead", {}, el("tr", {}, headings.map((h, i) => el("th", { scope: "col", class: numeric[i] && "number" }, h)))),
    el("tbody", {}, rows.map(row => el("tr", {}, row.map((cell, i) =>
      i === 0 ? el("th", { scope: "row", class: numeric[i] && "number" }, `${cell}`)
        : el("td", { class: numeric[i] && "number" }, `${cell ?? "–"}`))))));
}
const scrolling = (label, ...children) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, children);

function csv(rows) {
  const cell = value => {
    const text = value === null || value === undefined ? "" : String(value);
    // A text that a spreadsheet would take for a formula is quoted as text.
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return rows.map(row => row.map(cell).join(",")).join("\n") + "\n";
}
function download(name, rows) {
  const link = el("a", { href: URL.createObjectURL(new Blob([csv(rows)], { type: "text/csv" })), download: `${fileName(name)}.csv` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
const fileName = text => text.replace(/[^\p{L}\p{N}._-]+/gu, "-").slice(0, 120);

// A figure with its heading, its data as a table (made when asked for) and as CSV.
// `rows` are those of the CSV, the first one of them headings; `tableRows` fewer, where not all can be read, or null where
// the figure is a table already; both may need what `ready` waits for.
function figure(title, { note, name, rows, tableRows = rows, id, wide, extra, ready }, ...body) {
  const shown = el("div", { class: "scroll table", tabindex: 0, role: "region", "aria-label": `Table: ${title}` });
  const fill = async () => {
    if (!details?.open) return;
    await ready?.();
    const [head, ...rest] = tableRows();
    shown.replaceChildren(table(head, rest));
  };
  const save = async () => {
    await ready?.();
    download(name ?? title, rows());
  };
  const details = tableRows && el("details", { ontoggle: fill }, el("summary", {}, "Table"), shown);
  const element = el("figure", { id, class: wide ? "card wide" : "card" },
    el("figcaption", {}, el("h3", {}, title), extra ?? null, note ? el("p", { class: "note" }, note) : null),
    ...body,
    el("div", { class: "tools" }, details ?? el("span", {}),
      el("button", { type: "button", class: "quiet", "aria-label": `Download CSV: ${title}`, onclick: save }, "CSV")));
  element.refresh = fill;
  return element;
}
const section = (id, title, ...children) =>
  el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), children);
