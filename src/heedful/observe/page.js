// Attention maps: lines between tokens, and the mean of the chosen heads as a heatmap. The data is in #data.
"use strict";
const { maps } = JSON.parse(document.getElementById("data").textContent);
const NS = "http://www.w3.org/2000/svg", ROW = 19, GAP = 190;
const picked = { map: maps.length - 1, heads: new Set(), row: -1, column: -1 };
const $ = (id) => document.getElementById(id);
const label = (text) => (text.length > 18 ? text.slice(0, 17) + "…" : text);

function chosen() {
  const all = maps[picked.map].weights.map((_, head) => head);
  return picked.heads.size ? all.filter((head) => picked.heads.has(head)) : all;
}

function mean(row, column) {
  const heads = chosen(), { weights } = maps[picked.map];
  return heads.reduce((sum, head) => sum + weights[head][row][column], 0) / heads.length;
}

function add(parent, name, attributes, text) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
}

function controls() {
  const select = $("layer");
  maps.forEach((map, i) => select.add(new Option(map.name, i)));
  select.value = picked.map;
  select.onchange = () => { picked.map = +select.value; picked.heads.clear(); heads(); draw(); };
  heads();
}

function heads() {
  const box = $("heads");
  box.replaceChildren();
  maps[picked.map].weights.forEach((_, head) => {
    const button = document.createElement("button");
    button.textContent = head;
    button.setAttribute("aria-label", "head " + head);
    const show = () => button.setAttribute("aria-pressed", picked.heads.has(head));
    button.onclick = () => { picked.heads.has(head) ? picked.heads.delete(head) : picked.heads.add(head); show(); draw(); };
    show();
    box.appendChild(button);
  });
}

function lines() {
  const { rows, columns } = maps[picked.map], svg = $("lines");
  const left = 12 + 7.3 * Math.max(...rows.map((t) => label(t).length), 1);
  const right = 12 + 7.3 * Math.max(...columns.map((t) => label(t).length), 1);
  svg.replaceChildren();
  svg.setAttribute("width", left + GAP + right);
  svg.setAttribute("height", ROW * Math.max(rows.length, columns.length) + 8);
  const strokes = add(svg, "g", {});
  const most = 3000 / (rows.length * columns.length), least = most < 1 ? 0.1 : 0.02;
  rows.forEach((_, r) => columns.forEach((_, c) => {
    if ((picked.row >= 0 && r !== picked.row) || (picked.column >= 0 && c !== picked.column)) return;
    const weight = mean(r, c);
    if (weight < least) return;
    add(strokes, "line", { x1: left, y1: ROW * r + 12, x2: left + GAP, y2: ROW * c + 12,
      "stroke-opacity": Math.min(1, weight), "stroke-width": 1 + 2 * weight });
  }));
  const write = (tokens, x, anchor, key) => tokens.forEach((token, i) => {
    const text = add(svg, "text", { x, y: ROW * i + 16, "text-anchor": anchor }, label(token));
    if (picked[key] >= 0 && picked[key] !== i) text.classList.add("dim");
    text.onmouseenter = () => { picked.row = picked.column = -1; picked[key] = i; draw(); };
  });
  write(rows, left - 6, "end", "row");
  write(columns, left + GAP + 6, "start", "column");
}

function heat() {
  const { rows, columns } = maps[picked.map], canvas = $("heat");
  const cell = Math.max(2, Math.min(22, Math.floor(460 / Math.max(rows.length, columns.length))));
  canvas.width = cell * columns.length;
  canvas.height = cell * rows.length;
  const brush = canvas.getContext("2d");
  rows.forEach((_, r) => columns.forEach((_, c) => {
    brush.fillStyle = `rgba(200, 85, 61, ${mean(r, c)})`;
    brush.fillRect(cell * c, cell * r, cell, cell);
  }));
  canvas.onmousemove = (event) => {
    const r = Math.floor(event.offsetY / cell), c = Math.floor(event.offsetX / cell);
    if (r < rows.length && c < columns.length && r >= 0 && c >= 0)
      $("told").textContent = `${rows[r]} → ${columns[c]}: ${mean(r, c).toFixed(4)}`;
  };
}

function draw() { lines(); heat(); }
$("lines").onmouseleave = () => { picked.row = picked.column = -1; draw(); };
controls();
draw();
