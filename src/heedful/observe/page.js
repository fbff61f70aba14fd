// What a page shows of its numbers, which are in #data: matrices as heatmaps, and attention as lines between tokens.
// A matrix is { title, rows, columns, values, words?, notes?, signed, top, gamma, digits, rowName, columnName, scale }.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const NS = "http://www.w3.org/2000/svg", ROW = 19, GAP = 190, LETTER = 7.3;
const $ = (id) => document.getElementById(id);
const label = (text, most = 18) => {
  const seen = text.trim() || text;
  return seen.length > most ? seen.slice(0, most - 1) + "…" : seen;
};
const longest = (texts) => Math.max(1, ...texts.map((text) => label(text).length));
const largest = (values) => Math.max(1e-6, ...values.map((row) => Math.max(...row)));
const dark = matchMedia("(prefers-color-scheme: dark)");

function add(parent, name, attributes = {}, text) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
}

function element(parent, name, attributes = {}, text) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
}

/** Red, green, blue and how opaque a number is, from 0 to 1 of the largest. */
function colour(value, { top, signed, gamma }) {
  const much = Math.min(1, Math.abs(value) / top) ** gamma;
  const hue = signed && value < 0 ? (dark.matches ? [143, 176, 207] : [63, 84, 104]) : dark.matches ? [224, 122, 95] : [200, 85, 61];
  if (signed || much < 0.75) return [...hue, signed ? much : Math.min(1, much / 0.75)];
  const end = dark.matches ? [255, 226, 214] : [124, 44, 28]; // the largest are darker still, or lighter on dark paper
  const t = (much - 0.75) / 0.25;
  return [...hue.map((from, i) => from + (end[i] - from) * t), 1];
}

function painted(values, look) {
  const canvas = document.createElement("canvas");
  canvas.width = values[0]?.length ?? 1;
  canvas.height = values.length || 1;
  const brush = canvas.getContext("2d"), pixels = brush.createImageData(canvas.width, canvas.height);
  let at = 0;
  for (const row of values) for (const value of row) {
    const [r, g, b, a] = colour(value, look);
    pixels.data[at++] = r, pixels.data[at++] = g, pixels.data[at++] = b, pixels.data[at++] = 255 * a;
  }
  brush.putImageData(pixels, 0, 0);
  return canvas;
}

/** Every how many labels fit, if one takes the room of `least`; of numbers a round one. */
function step(labels, least) {
  const rounds = /^-?\d+$/.test(labels[0] ?? "") ? [1, 2, 5, 10, 20, 50, 100, 200, 500] : [];
  return rounds.find((n) => n >= least) ?? Math.max(1, Math.ceil(least));
}

/** A heatmap in `box` whose cells the mouse and the arrow keys read. `onhover(row, column)`; the answer marks a cell. */
function matrix(box, spec, onhover = () => {}) {
  const look = { gamma: 1, digits: 3, rowName: "", columnName: "", ...spec };
  const { rows, columns, values, words, notes } = look;
  if (look.title) element(box, "h2", {}, look.title);
  const holder = element(box, "div", { class: "drawing" });
  const said = element(box, "p", { class: "told", "aria-live": "polite" });
  const room = data.matrices?.length > 1 ? 400 : 460; // pixels: two of several stand side by side
  const side = look.cell ?? Math.max(2, Math.min(24, Math.floor(room / Math.max(rows.length, columns.length, 1))));
  const wide = words ? LETTER * Math.max(3, ...words.map((row) => longest(row.map((word) => label(word, 9))))) + 8 : side;
  const tall = words ? 22 : side;
  const numbers = columns.every((name) => /^-?\d+$/.test(name)); // thinned out, they can stay upright
  const narrow = words || numbers || columns.every((name) => label(name).length * LETTER <= wide);
  const size = Math.max(9, Math.min(12, 0.95 * tall)); // of letters
  const every = step(rows, size / tall), across = words ? 1 : step(columns, (numbers ? LETTER * longest(columns) + 8 : size) / wide);
  const left = LETTER * longest(rows) + 8 + (look.rowName ? 18 : 0);
  const above = (narrow ? 18 : LETTER * longest(columns) + 10) + (look.columnName ? 16 : 0);
  const [width, height] = [wide * columns.length, tall * rows.length];
  const svg = add(holder, "svg", { width: left + width + 12, height: above + height + 34, tabindex: 0, role: "application",
    "aria-label": `${look.title || document.title}: a heatmap of ${rows.length} rows and ${columns.length} columns. Arrow keys read its cells.` });
  svg.style.setProperty("--size", `${size}px`);
  if (look.rowName) add(svg, "text", { class: "small", "text-anchor": "middle", transform: `translate(11 ${above + height / 2}) rotate(-90)` }, look.rowName);
  if (look.columnName) add(svg, "text", { class: "small", x: left + width / 2, y: 11, "text-anchor": "middle" }, look.columnName);
  rows.forEach((name, r) => { if (r % every === 0) add(svg, "text", { x: left - 6, y: above + tall * (r + 0.5) + size / 3, "text-anchor": "end" }, label(name)); });
  columns.forEach((name, c) => {
    if (c % across) return;
    const x = left + wide * (c + 0.5);
    if (narrow) add(svg, "text", { x, y: above - 6, "text-anchor": "middle" }, label(name, words ? 9 : 18));
    else add(svg, "text", { transform: `translate(${x + size / 3} ${above - 5}) rotate(-90)` }, label(name));
  });
  const image = add(svg, "image", { x: left, y: above, width, height, preserveAspectRatio: "none" });
  add(svg, "rect", { class: "edge", x: left - 0.5, y: above - 0.5, width: width + 1, height: height + 1 });
  const written = add(svg, "g");
  const legend = add(svg, "image", { x: left, y: above + height + 13, width: 72, height: 8, preserveAspectRatio: "none" });
  const round = (x) => String(+x.toPrecision(2));
  const scale = add(svg, "text", { class: "small", x: left + 78, y: above + height + 21 });
  svg.setAttribute("width", left + Math.max(width + 12, 90 + 6.2 * (18 + (look.scale ?? "").length)));
  const cursor = add(svg, "rect", { class: "cursor", width: wide, height: tall, visibility: "hidden" });
  let at = null;

  function paint() {
    image.setAttribute("href", painted(look.values, look).toDataURL());
    const low = look.signed ? -look.top : 0;
    scale.textContent = `${round(low)} to ${round(look.top)}${look.scale ? " " + look.scale : ""}`;
    const steps = Array.from({ length: 72 }, (_, i) => low + (look.top - low) * i / 71);
    legend.setAttribute("href", painted([steps], look).toDataURL());
    if (!words) return;
    written.replaceChildren();
    words.forEach((row, r) => row.forEach((word, c) => {
      const deep = colour(look.values[r][c], look)[3] > 0.55 && !dark.matches;
      add(written, "text", { x: left + wide * (c + 0.5), y: above + tall * (r + 0.5) + 4, "text-anchor": "middle", class: deep ? "light" : "" }, label(word, 9));
    }));
  }
  function show(row, column, tell = true) {
    at = row === null ? null : [row, column];
    cursor.setAttribute("visibility", at ? "visible" : "hidden");
    said.replaceChildren();
    if (at) {
      cursor.setAttribute("x", left + wide * column);
      cursor.setAttribute("y", above + tall * row);
      const name = (what, text) => (what ? `${what} ${label(text)}` : `“${label(text)}”`);
      said.append(`${name(look.rowName, rows[row])} → ${name(look.columnName, columns[column])}: `);
      element(said, "b", {}, look.values[row][column].toFixed(look.digits));
      if (notes) said.append(`\n${notes[row][column]}`);
    }
    if (tell) onhover(at ? row : -1, at ? column : -1);
  }
  const within = (value, count) => Math.min(Math.max(value, 0), count - 1);
  svg.onpointermove = svg.onpointerdown = (event) => {
    const area = svg.getBoundingClientRect();
    const [r, c] = [Math.floor((event.clientY - area.top - above) / tall), Math.floor((event.clientX - area.left - left) / wide)];
    const inside = r >= 0 && c >= 0 && r < rows.length && c < columns.length;
    if (inside ? !at || at[0] !== r || at[1] !== c : at) show(inside ? r : null, c);
  };
  svg.onpointerleave = () => { if (document.activeElement !== svg) show(null); };
  svg.onblur = () => show(null);
  svg.onkeydown = (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (event.key === "Escape") show(null);
    if (!step || !rows.length || !columns.length) return;
    event.preventDefault();
    const [r, c] = at ? [at[0] + step[0], at[1] + step[1]] : [0, 0];
    show(within(r, rows.length), within(c, columns.length));
  };
  dark.addEventListener("change", paint);
  paint();
  return { set(values, top) { Object.assign(look, { values, top }); paint(); if (at) show(...at, false); } };
}

/** Attention: a layer and heads to choose, lines, and the mean of the chosen heads as a heatmap. */
function attention({ maps, overview, head }) {
  const picked = { map: maps.length - 1, heads: new Set(head === null ? [] : [head]), row: -1, column: -1 };
  let heat = null;
  const all = () => maps[picked.map].weights.map((_, head) => head);
  const chosen = () => (picked.heads.size ? all().filter((head) => picked.heads.has(head)) : all());
  function mean() {
    const { weights } = maps[picked.map], heads = chosen();
    return weights[0].map((row, r) => row.map((_, c) => heads.reduce((sum, head) => sum + weights[head][r][c], 0) / heads.length));
  }
  let means = mean();

  function choose() {
    const box = $("heads");
    box.replaceChildren();
    all().forEach((head) => {
      const button = element(box, "button", { "aria-label": "head " + head, "aria-pressed": picked.heads.has(head) }, head);
      button.onclick = () => {
        picked.heads.has(head) ? picked.heads.delete(head) : picked.heads.add(head);
        button.setAttribute("aria-pressed", picked.heads.has(head));
        changed();
      };
    });
    $("layer").value = picked.map;
  }
  function changed() {
    means = mean();
    lines();
    heat.set(means, largest(means));
    mark();
  }
  function mark() {
    for (const button of document.querySelectorAll("#overview button"))
      button.setAttribute("aria-pressed", +button.dataset.map === picked.map && picked.heads.size === 1 && picked.heads.has(+button.dataset.head));
  }
  function layer() {
    const { rows, columns } = maps[picked.map];
    picked.row = picked.column = -1;
    means = mean();
    choose();
    $("heat").replaceChildren();
    heat = matrix($("heat"), { rows, columns, values: means, top: largest(means), gamma: 0.6, digits: 4, signed: false, scale: "weight" },
      (row, column) => { [picked.row, picked.column] = [row, column]; lines(); });
    lines();
    mark();
  }
  function lines() {
    const { rows, columns } = maps[picked.map], svg = $("lines");
    const left = 12 + LETTER * longest(rows), right = 12 + LETTER * longest(columns);
    svg.replaceChildren();
    svg.setAttribute("width", left + GAP + right);
    svg.setAttribute("height", ROW * Math.max(rows.length, columns.length) + 8);
    const strokes = add(svg, "g"), few = rows.length * columns.length <= 3000;
    const least = picked.row >= 0 || picked.column >= 0 ? 0.005 : few ? 0.02 : 0.1;
    rows.forEach((_, r) => columns.forEach((_, c) => {
      const weight = means[r][c];
      if (weight < least || (picked.row >= 0 && r !== picked.row) || (picked.column >= 0 && c !== picked.column)) return;
      add(strokes, "line", { x1: left, y1: ROW * r + 12, x2: left + GAP, y2: ROW * c + 12, "stroke-opacity": Math.min(1, weight), "stroke-width": 1 + 2 * weight });
    }));
    const write = (tokens, x, anchor, key) => tokens.forEach((token, i) => {
      const text = add(svg, "text", { x, y: ROW * i + 16, "text-anchor": anchor }, label(token));
      if (picked[key] >= 0) text.classList.add(picked[key] === i ? "on" : "dim");
      text.onpointerenter = () => point(key, i);
    });
    write(rows, left - 6, "end", "row");
    write(columns, left + GAP + 6, "start", "column");
  }
  function point(key, i) {
    if (picked[key] === i && picked[key === "row" ? "column" : "row"] < 0) return;
    picked.row = picked.column = -1;
    picked[key] = i;
    lines();
    const { rows, columns } = maps[picked.map], other = key === "row" ? columns : rows;
    const weights = other.map((_, j) => (key === "row" ? means[i][j] : means[j][i]));
    const best = weights.map((_, j) => j).sort((a, b) => weights[b] - weights[a]).slice(0, 5);
    const quoted = (text) => `“${label(text)}”`, name = quoted((key === "row" ? rows : columns)[i]);
    $("told").textContent = `${name} ${key === "row" ? "looks at" : "is looked at by"} ${best.map((j) => `${quoted(other[j])} ${weights[j].toFixed(4)}`).join(", ")}`;
  }
  function clear() {
    picked.row = picked.column = -1;
    $("told").textContent = "";
    lines();
  }
  const select = $("layer"), svg = $("lines");
  maps.forEach((map, i) => select.add(new Option(map.name, i)));
  select.onchange = () => { picked.map = +select.value; picked.heads.clear(); layer(); };
  svg.onpointerleave = () => document.activeElement !== svg && clear();
  svg.onblur = clear;
  svg.onkeydown = (event) => {
    const { rows, columns } = maps[picked.map];
    if (event.key === "Escape") return clear();
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    let key = picked.column >= 0 && picked.row < 0 ? "column" : "row";
    if (event.key === "ArrowLeft") key = "row";
    if (event.key === "ArrowRight") key = "column";
    const count = (key === "row" ? rows : columns).length, now = Math.max(picked.row, picked.column, 0);
    const move = { ArrowUp: -1, ArrowDown: picked.row < 0 && picked.column < 0 ? 0 : 1 }[event.key] ?? 0;
    point(key, Math.min(Math.max(now + move, 0), count - 1));
  };
  layer();
  if (overview) thumbnails();

  function thumbnails() {
    const box = $("overview"), heads = Math.max(...maps.map((map) => map.weights.length));
    const size = Math.max(28, Math.min(72, Math.floor(900 / heads) - 6));
    box.style.gridTemplateColumns = `auto repeat(${heads}, auto)`;
    element(box, "span", {}, "layer / head");
    for (let h = 0; h < heads; h++) element(box, "span", {}, h);
    maps.forEach((map, layerIndex) => {
      element(box, "span", {}, layerIndex);
      map.weights.forEach((weights, head) => {
        const button = element(box, "button", { "aria-label": `${map.name}, head ${head}`, "data-map": layerIndex, "data-head": head });
        const draw = () => {
          const canvas = painted(weights, { top: largest(weights), gamma: 0.6 });
          canvas.style.width = `${size}px`;
          canvas.style.height = `${Math.round(size * Math.min(2, Math.max(0.5, weights.length / weights[0].length)))}px`;
          button.replaceChildren(canvas);
        };
        button.onclick = () => { picked.map = layerIndex; picked.heads = new Set([head]); layer(); };
        dark.addEventListener("change", draw);
        draw();
      });
      for (let h = map.weights.length; h < heads; h++) element(box, "span");
    });
    mark();
  }
}

if (data.maps) attention(data);
for (const [i, spec] of (data.matrices ?? []).entries()) matrix($(`matrix-${i}`), spec);
