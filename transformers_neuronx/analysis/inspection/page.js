"use strict";
// Draws the page from the JSON in it. Names are inserted as text, never as markup.
const facts = JSON.parse(document.getElementById("facts").textContent);
const programs = facts.programs || [facts];
const at = (id) => document.getElementById(id);
let program = programs[0];
let chosen = null; // the row of layers whose operations are shown; null for all

function make(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function scaled(value, unit) {
  const sizes = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
  const [size, letter] = sizes.find(([size]) => value >= size) || [1, ""];
  const number = value / size;
  return `${number.toFixed(size === 1 ? 0 : number < 10 ? 2 : 1)} ${letter}${unit}`;
}

const bytes = (value) => scaled(value, "B");
const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");
const moved = (row) => row.read + row.written;
const times = (row, key) => row.repeats * (key === "moved" ? moved(row) : row[key]);
const named = (row) => (row.repeats > 1 ? `${row.name} … ${row.last}` : row.name);

function tiles(id, cells) {
  at(id).replaceChildren(...cells.map(([name, value, more]) => {
    const tile = make("div");
    tile.append(make("b", value), make("span", name), make("br"), make("small", more || ""));
    return tile;
  }));
}

function bar(flops, moved) {
  const drawn = at("bar").content.firstElementChild.cloneNode(true);
  drawn.querySelector(".flops").setAttribute("width", 100 * flops || 0);
  drawn.querySelector(".bytes").setAttribute("width", 100 * moved || 0);
  return drawn;
}

// A table that its head sorts. Columns: a title, the cell's text or node, the key to sort by, whether it is text.
function table(id, columns, rows, sorted = null) {
  const element = at(id);
  const order = rows.map((row, place) => ({ row, place }));
  if (sorted) {
    const key = columns[sorted.column].key;
    order.sort((a, b) => {
      const [x, y] = [key(a.row), key(b.row)];
      return (x < y ? -1 : x > y ? 1 : 0) * sorted.way || a.place - b.place;
    });
  }
  const head = make("tr");
  columns.forEach((column, number) => {
    const cell = make("th", undefined, column.text ? { class: "text", scope: "col" } : { scope: "col" });
    if (column.key) {
      const button = make("button", column.title, { type: "button" });
      const now = sorted && sorted.column === number ? sorted.way : 0;
      if (now) cell.setAttribute("aria-sort", now > 0 ? "ascending" : "descending");
      const way = now ? -now : column.text ? 1 : -1;
      button.addEventListener("click", () => table(id, columns, rows, { column: number, way }));
      cell.append(button);
    } else cell.textContent = column.title;
    head.append(cell);
  });
  const body = make("tbody");
  for (const { row } of order) {
    const line = make("tr");
    for (const column of columns) {
      const cell = make("td", undefined, { class: column.bars ? "bars" : column.text ? "text" : "" });
      const value = column.cell(row);
      if (column.code) cell.append(make("code", value));
      else cell.append(value);
      line.append(cell);
    }
    body.append(line);
  }
  const top = make("thead");
  top.append(head);
  element.replaceChildren(top, body);
}

function costs(id, rows, total) {
  const most = Math.max(...rows.map((row) => times(row, "flops") / total.flops || 0),
    ...rows.map((row) => times(row, "moved") / moved(total) || 0), 1e-9);
  table(id, [
    { title: "", text: true, cell: named, key: named },
    { title: "×", cell: (row) => String(id === "ops" ? row.count : row.repeats),
      key: (row) => (id === "ops" ? row.count : row.repeats) },
    { title: "FLOP", cell: (row) => scaled(times(row, "flops"), ""), key: (row) => times(row, "flops") },
    { title: "", cell: (row) => share(times(row, "flops"), total.flops) },
    { title: "bytes", cell: (row) => bytes(times(row, "moved")), key: (row) => times(row, "moved") },
    { title: "", cell: (row) => share(times(row, "moved"), moved(total)) },
    { title: "", bars: true,
      cell: (row) => bar(times(row, "flops") / total.flops / most, times(row, "moved") / moved(total) / most) },
  ], rows);
}

// The operations of one layer; for a row of equal layers, those of the first.
function opsOf(layer) {
  const sums = new Map();
  for (const cost of program.costs) {
    if (cost.layer !== layer.name) continue;
    const sum = sums.get(cost.op) || { name: cost.op, repeats: 1, count: 0, flops: 0, read: 0, written: 0 };
    for (const key of ["count", "flops", "read", "written"]) sum[key] += cost[key];
    sums.set(cost.op, sum);
  }
  return [...sums.values()].sort((a, b) => b.flops - a.flops || moved(b) - moved(a));
}

function drawOps() {
  at("within").textContent = chosen ? `in ${chosen.name}` : "";
  const total = chosen || program.total;
  costs("ops", chosen ? opsOf(chosen) : program.ops, total);
  const loops = program.loops ? " Loops are counted for one iteration." : "";
  at("rule").textContent = `Composites are listed by name, other operations by opcode.${loops}`;
}

function drawGraph() {
  const nodes = [];
  const inside = program.layers.filter((layer) => layer.name !== "(outside)");
  for (const layer of inside.length ? inside : program.layers) {
    if (nodes.length) nodes.push(make("span", "→", { class: "arrow", "aria-hidden": "true" }));
    const node = make("button", undefined, {
      type: "button", class: layer.repeats > 1 ? "node many" : "node", "aria-pressed": String(chosen === layer),
    });
    const many = layer.repeats > 1 ? `${layer.name} × ${layer.repeats}` : layer.name;
    node.append(make("b", many), make("span", scaled(layer.flops, "FLOP")), make("span", bytes(moved(layer))));
    if (layer.repeats > 1) node.append(make("span", "each"));
    node.addEventListener("click", () => {
      chosen = chosen === layer ? null : layer;
      drawGraph();
      drawOps();
    });
    nodes.push(node);
  }
  at("graph").replaceChildren(...nodes);
}

const split = (row) => (row.degree > 1 ? `axis ${row.axis} by ${row.degree}` : row.whole ? "whole" : "");
const sizesOf = (row) => (row.whole ? `${row.shape.split("[")[0]}[${row.whole}]` : row.shape);
const weightColumns = [
  { title: "name", text: true, code: true, cell: (row) => row.name, key: (row) => row.name },
  { title: "whole", text: true, code: true, cell: sizesOf, key: sizesOf },
  { title: "split", text: true, cell: split, key: split },
  { title: "per device", text: true, code: true, cell: (row) => row.shape, key: (row) => row.shape },
  { title: "bytes", cell: (row) => bytes(row.bytes), key: (row) => row.bytes },
];

function drawParameters() {
  const part = at("filter").value.toLowerCase();
  const rows = program.parameters.filter((row) => row.name.toLowerCase().includes(part));
  at("count").textContent = `${rows.length} of ${program.parameters.length}`;
  const results = new Set(program.outputs.map((result) => result.takes));
  const kind = (row) => row.same_as ? `${row.kind}, = ${row.same_as}` : results.has(row.name) ? `${row.kind}, in place`
    : row.kind;
  table("parameters", [...weightColumns, { title: "kind", text: true, cell: kind, key: kind }], rows);
}

function draw() {
  chosen = null;
  const total = program.total;
  const { weight, cache, input } = program.held;
  at("about").textContent = program.runs > 1 ? `runs ${program.runs} times in a step` : "";
  const loops = program.loops ? "one iteration of loops" : "one run";
  tiles("sizes", [
    ["FLOPs", scaled(total.flops, "FLOP"), `${share(total.products, total.flops)} in products, ${loops}`],
    ["read", bytes(total.read), loops],
    ["written", bytes(total.written), loops],
    ["FLOP per byte", (total.flops / moved(total) || 0).toFixed(2), "read or written"],
    ["weights", bytes(weight), `caches ${bytes(cache)}, inputs ${bytes(input)}`],
    ["temporaries", bytes(program.temporaries), "estimated"],
  ]);
  drawGraph();
  costs("layers", program.layers, total);
  drawOps();
  drawParameters();
  for (const text of document.querySelectorAll("#listing pre")) {
    text.hidden = Number(text.dataset.program) !== programs.indexOf(program);
  }
}

function drawModel() {
  const devices = facts.degree > 1 ? `each of ${facts.degree} devices` : "one device";
  const { amp, batch_size: rows } = facts.options;
  at("summary").textContent = `${amp}, ${rows} ${rows === 1 ? "sequence" : "sequences"} at once; numbers are for ${devices}`;
  tiles("tiles", [
    ["parameters", scaled(facts.weight_count, ""), facts.weight_count.toLocaleString("en")],
    ["weights", bytes(facts.weight_bytes), devices],
    ["caches", bytes(facts.caches), devices],
    ["temporaries", bytes(facts.temporaries), "at most, estimated"],
    ["programs", String(programs.length), "compiled ahead of time"],
  ]);
  for (const [group, values] of [["", facts.config], ["option ", facts.options]]) {
    for (const [name, value] of Object.entries(values)) {
      at("config").append(make("dt", group + name), make("dd", typeof value === "string" ? value : JSON.stringify(value)));
    }
  }
  const layers = { title: "layers", cell: (row) => String(row.layers), key: (row) => row.layers };
  const total = (row) => row.layers * row.bytes;
  const all = { title: "total", cell: (row) => (row.same_as ? `= ${row.same_as}` : bytes(total(row))), key: total };
  table("weights", [...weightColumns, layers, all], facts.weights);
}

if (facts.programs) drawModel();
else for (const id of ["model", "weights"]) at(id).closest("section").hidden = true;
programs.forEach((each, number) => at("program").append(make("option", each.name, { value: number })));
at("program").addEventListener("change", (event) => {
  program = programs[Number(event.target.value)];
  draw();
});
at("filter").addEventListener("input", drawParameters);
draw();
document.documentElement.dataset.ready = "true";
