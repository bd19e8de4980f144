/* Draws the figures of a report at the width there is; what is drawn is decided by analysis/report/charts.py. */
const Charts = (() => {
  const { make, html, paint, fixed, short, linear, logarithmic, spread, robust, frame, show, hide, follow, axes } = Svg;
  const NARROW = 560, MOST = 8;
  const STATUS = {
    ok: "--c0", pruned: "--grey", diverged: "--c1", out_of_memory: "--c3", timed_out: "--c4", preempted: "--c2", failed: "--black",
    better: "--c0", worse: "--c1", equal: "--c2", undecided: "--grey",
  };
  let clips = 0;

  const colours_of = (items, by) => {
    const counts = new Map();
    for (const item of items) counts.set(item.g[by], (counts.get(item.g[by]) || 0) + 1);
    const names = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a) || (a < b ? -1 : 1));
    const colour = new Map(names.map((name, place) => [name, by === 0 && STATUS[name] ? STATUS[name] : place < MOST ? `--c${place}` : "--grey"]));
    return { names, counts, colour };
  };

  /* Curves (item.p: points) and clouds (item.x: one place a measure, item.y), coloured by any choice. */
  const xy = (spec, state, plot, width) => {
    const { colour } = colours_of(spec.items, state.by);
    const seen = spec.items.filter((item) => !state.hidden.has(item.g[state.by]));
    const axis = spec.x[state.x], points = (item) => (spec.lines ? item.p : [[item.x[state.x], item.y]]);
    const placed = seen.filter((item) => spec.lines || item.x[state.x] != null);
    const xs = placed.flatMap((item) => points(item).map((point) => point[0]));
    const ys = placed.flatMap((item) => points(item).map((point) => point[1])).filter((y) => y != null);
    const height = width < NARROW ? 320 : 400;
    const svg = frame(plot, width, height, spec.label);
    if (!ys.length) { make("text", { x: 8, y: 40 }, svg, "Nothing is chosen."); return; }
    const area = { left: 48, right: width - 14, top: 24, bottom: height - 44 };
    const [least, most] = [Math.min(...xs), Math.max(...xs)], log = axis.log && least > 0;
    const across = log ? [least / 1.15, most * 1.15] : axis.zero ? [0, most * 1.02] : spread(least, most, Math.max(0.05, most === least ? 0.05 : 0));
    const x = (log ? logarithmic : linear)(...across, area.left, area.right, width < NARROW ? 5 : 9);
    const bars = spec.error && !spec.lines ? spec.error : 0;
    const ringed = (spec.fronts ? spec.fronts[state.x] : []).map((place) => spec.items[place]);
    const marked = placed.filter((item) => item.m || ringed.includes(item)).map((item) => points(item).at(-1)[1]);
    const [bottom, top] = robust(ys, [...spec.levels.map((level) => level.y), ...marked.filter((loss) => loss != null)]), [low, high] = [bottom - bars, top + bars];
    const y = linear(low, high, area.bottom, area.top, 6);
    axes(svg, area, x, y, axis.label, spec.y);
    const id = `clip${clips++}`;
    make("rect", { x: area.left, y: area.top - 6, width: area.right - area.left, height: area.bottom - area.top + 6 },
      make("clipPath", { id }, make("defs", {}, svg)));
    const inner = make("g", { "clip-path": `url(#${id})` }, svg);
    for (const level of spec.levels) {
      make("line", { class: "level", x1: area.left, x2: area.right, y1: y.at(level.y), y2: y.at(level.y) }, inner);
      make("text", { class: "soft", x: area.right - 4, y: y.at(level.y) - 5, "text-anchor": "end" }, svg, level.label);
    }
    const path = (list) => list.map((point, k) => `${k ? "L" : "M"}${x.at(point[0]).toFixed(1)},${y.at(point[1]).toFixed(1)}`).join("");
    for (const [name, fit] of Object.entries(spec.fits ? spec.fits[state.by] || {} : {})) {
      if (state.hidden.has(name)) continue;
      const band = [...fit.map((f) => [f[0], f[2]]), ...fit.map((f) => [f[0], f[3]]).reverse()];
      paint(make("path", { d: `${path(band)}Z`, opacity: 0.13 }, inner), colour.get(name));
      paint(make("path", { d: path(fit), fill: "none", "stroke-width": 1.6 }, inner), colour.get(name), "stroke");
    }
    const spots = [], lit = new Map();
    for (const item of placed.slice().sort((a, b) => !!a.m - !!b.m)) {
      const shade = colour.get(item.g[state.by]), list = points(item).filter((point) => point[1] != null);
      const strong = item.m === "best" || item.m === "baseline";
      if (spec.lines) {
        const line = make("path", { d: path(list), fill: "none", "stroke-width": strong ? 3 : 1.3, opacity: strong ? 1 : 0.6 }, inner);
        lit.set(item, [paint(line, shade, "stroke"), strong ? 3 : 1.3]);
      }
      const last = list[list.length - 1];
      if (last && spec.error && (!spec.lines || strong)) {
        const bar = { x1: x.at(last[0]), x2: x.at(last[0]), y1: y.at(last[1] - spec.error), y2: y.at(last[1] + spec.error), opacity: spec.lines ? 1 : 0.45 };
        paint(make("line", { ...bar, "stroke-width": spec.lines ? 2 : 1 }, inner), shade, "stroke");
      }
      for (const [place, point] of points(item).entries()) {
        const [px, py] = [x.at(point[0]), point[1] == null ? area.top : Math.max(area.top - 4, y.at(point[1]))];
        spots.push({ x: px, y: py, item, words: `${item.l}\n${axis.label}: ${short(point[0])}\n${point[1] == null ? item.e || "no loss" : `${spec.y}: ${fixed(point[1], 4)}`}` });
        const ends = place === points(item).length - 1;
        if (spec.lines && !ends) continue;
        const bad = point[1] == null || item.e === "bad";
        const mark = bad ? make("path", { d: `M${px - 4},${py - 4}l8,8m0,-8l-8,8`, fill: "none", "stroke-width": 1.8 }, inner)
          : item.m === "baseline" ? make("path", { d: `M${px},${py - 7}l7,7l-7,7l-7,-7Z` }, inner)
          : make("circle", { cx: px, cy: py, r: strong ? 6 : spec.lines ? 2.5 : 4, opacity: strong ? 1 : 0.8 }, inner);
        paint(mark, shade, bad ? "stroke" : "fill");
        if (strong) {
          const flip = px > area.right - 130;
          make("text", { x: px + (flip ? -9 : 9), y: Math.max(py - 7, 12), "text-anchor": flip ? "end" : "start", "font-weight": 600, "paint-order": "stroke", style: "stroke:var(--page);stroke-width:3px" }, svg, `${item.m} ${item.s}`);
        }
      }
    }
    const ring = ringed.filter((item) => placed.includes(item)).map((item) => [item.x[state.x], item.y]);
    if (ring.length) paint(make("path", { d: path(ring), fill: "none", "stroke-width": 1.5, "stroke-dasharray": "2 3" }, inner), "--ink", "stroke");
    for (const point of ring) paint(make("circle", { cx: x.at(point[0]), cy: y.at(point[1]), r: 9, fill: "none", "stroke-width": 1.5 }, inner), "--ink", "stroke");
    const glow = paint(make("circle", { r: 8, fill: "none", "stroke-width": 2, visibility: "hidden" }, svg), "--ink", "stroke");
    follow(svg, spots, (spot) => {
      for (const [item, [line, wide]] of lit) line.setAttribute("stroke-width", spot && spot.item === item ? wide + 2 : wide);
      glow.setAttribute("visibility", spot ? "visible" : "hidden");
      if (spot) { glow.setAttribute("cx", spot.x); glow.setAttribute("cy", spot.y); }
    });
  };

  /* A row for each estimate with its interval; dots are single measurements. */
  const rows = (spec, state, plot, width) => {
    const wide = width >= NARROW, step = wide ? 30 : 46;
    const seen = spec.rows.filter((row) => !state.hidden.has(row.c));
    const left = wide ? Math.min(width * 0.46, 12 + 6.4 * Math.max(...spec.rows.map((row) => row.l.length))) : 10;
    const height = 28 + seen.length * step + 44;
    const svg = frame(plot, width, height, spec.label);
    const area = { left, right: width - 12, top: 20, bottom: height - 40 };
    const ends = seen.flatMap((row) => [row.e, row.lo, row.hi, ...(row.d || [])]).filter((value) => value != null);
    const [low, high] = spec.share ? [0, Math.min(1, Math.max(...ends, 0.1) * 1.05)] : spread(Math.min(0, ...ends), Math.max(0, ...ends), 0.06);
    const x = linear(low, high, area.left, area.right, wide ? 7 : 4);
    if (spec.share) x.name = (value) => `${Math.round(100 * value)} %`;
    for (const tick of x.ticks) {
      make("line", { class: "grid", x1: x.at(tick), x2: x.at(tick), y1: area.top, y2: area.bottom }, svg);
      make("text", { class: "soft", x: x.at(tick), y: area.bottom + 15, "text-anchor": "middle" }, svg, x.name(tick));
    }
    make("line", { class: "axis", x1: x.at(0), x2: x.at(0), y1: area.top, y2: area.bottom }, svg);
    const middle = (area.left + area.right) / 2;
    make("text", { x: middle, y: area.bottom + 33, "text-anchor": "middle" }, svg, spec.x);
    const spots = [];
    const most = Math.floor((left - 12) / 6.4);
    for (const [place, row] of seen.entries()) {
      const y = area.top + place * step + (wide ? step / 2 : 30), shade = STATUS[row.c] || "--c0";
      const words = wide && row.l.length > most ? `${row.l.slice(0, most - 1)}…` : row.l;
      make("text", wide ? { x: left - 10, y: y + 4, "text-anchor": "end" } : { x: 10, y: y - 12, class: "over" }, svg, words);
      if (row.lo != null) paint(make("line", { x1: x.at(row.lo), x2: x.at(row.hi), y1: y, y2: y, "stroke-width": row.d ? 8 : 3, opacity: row.d ? 0.4 : 1 }, svg), shade, "stroke");
      for (const dot of row.d || []) paint(make("circle", { cx: x.at(dot), cy: y, r: 3.5 }, svg), shade);
      if (row.e != null) paint(row.d ? make("line", { x1: x.at(row.e), x2: x.at(row.e), y1: y - 8, y2: y + 8, "stroke-width": 2.5 }, svg) : make("circle", { cx: x.at(row.e), cy: y, r: 5.5 }, svg), shade, row.d ? "stroke" : "fill");
      spots.push({ x: middle, y, words: row.w });
    }
    const stripe = make("rect", { x: 0, width, height: step, opacity: 0.06, visibility: "hidden" }, svg);
    paint(stripe, "--ink");
    const nearest = spots.map((spot) => ({ ...spot }));
    const move = (event) => {
      const y = event.clientY - svg.getBoundingClientRect().top;
      const place = Math.floor((y - area.top) / step);
      stripe.setAttribute("visibility", nearest[place] ? "visible" : "hidden");
      if (!nearest[place]) { hide(); return; }
      stripe.setAttribute("y", area.top + place * step);
      show(nearest[place].words, event);
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", () => { stripe.setAttribute("visibility", "hidden"); hide(); });
  };

  const DIVERGING = [[26, 97, 158], [240, 240, 236], [178, 72, 16]];
  const SEQUENTIAL = [[0, 42, 97], [124, 123, 120], [253, 231, 85]];
  const blend = (stops, share) => {
    const place = Math.max(0, Math.min(1, share)) * 2, base = Math.min(1, Math.floor(place));
    return stops[base].map((from, k) => Math.round(from + (stops[base + 1][k] - from) * (place - base)));
  };

  /* A map of cells; each says its number, what it rests on, and its interval. */
  const grid = (spec, state, plot, width) => {
    const view = spec.views[state.view];
    const left = Math.min(width * 0.34, 16 + 6.6 * Math.max(...view.rows.map((name) => name.length)));
    const cell = Math.min(110, (width - left - 8) / view.columns.length);
    const crowded = view.columns.some((name) => name.length * 6.6 > cell - 6);
    const tall = cell > 54 && view.notes ? 44 : 28, top = crowded ? 22 + Math.min(110, 5 * Math.max(...view.columns.map((name) => name.length))) : 40;
    const height = top + view.rows.length * tall + 12;
    const svg = frame(plot, width, height, `${spec.label}: ${view.name}`);
    make("text", { class: "soft", x: left, y: 12 }, svg, view.across);
    const values = view.cells.flat().filter((value) => value != null);
    const peak = Math.max(...values.map(Math.abs), 1e-12);
    const [low, high] = spec.diverging ? [-peak, peak] : view.log ? [Math.log(Math.min(...values)), Math.log(Math.max(...values))] : [Math.min(0, ...values), Math.max(...values)];
    const share = (value) => (high > low ? ((view.log ? Math.log(value) : value) - low) / (high - low) : 0.5);
    const most = Math.floor((left - 10) / 6.4);
    view.columns.forEach((name, k) => {
      const place = { x: left + cell * (k + 0.5), y: top - 8 };
      const turned = crowded ? { transform: `rotate(-38 ${place.x} ${place.y})`, "text-anchor": "start" } : { "text-anchor": "middle" };
      make("text", { ...place, ...turned }, svg, name);
    });
    view.rows.forEach((name, row) => {
      const y = top + row * tall;
      make("text", { x: left - 8, y: y + tall / 2 + 4, "text-anchor": "end" }, svg, name.length > most ? `${name.slice(0, most - 1)}…` : name);
      view.cells[row].forEach((value, k) => {
        const box = { x: left + cell * k + 1, y: y + 1, width: Math.max(1, cell - 2), height: tall - 2, rx: 2 };
        const rectangle = make("rect", box, svg), note = view.notes ? view.notes[row][k] : "";
        const words = `${name} × ${view.columns[k]}\n${value == null ? "" : `${spec.unit} ${short(value)}\n`}${note}`;
        rectangle.addEventListener("pointermove", (event) => show(words, event));
        rectangle.addEventListener("pointerdown", (event) => show(words, event));
        rectangle.addEventListener("pointerleave", hide);
        if (value == null) { paint(rectangle, "--card"); return; }
        const [r, g, b] = blend(spec.diverging ? DIVERGING : SEQUENTIAL, share(value));
        rectangle.style.fill = `rgb(${r} ${g} ${b})`;
        const ink = 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#000" : "#fff";
        const text = (words_, down, size) => {
          const label = make("text", { x: box.x + box.width / 2, y: y + tall / 2 + down, "text-anchor": "middle", "pointer-events": "none", "font-size": size }, svg, words_);
          label.style.fill = ink;
        };
        const shown = spec.diverging ? (value > 0.0005 ? "+" : "") + fixed(value, 3) : short(value);
        if (cell > 6.6 * shown.length + 2) text(shown, tall > 40 ? -3 : 4, 12);
        if (tall > 40 && view.counts) {
          const [count, interval] = view.counts[row][k].split(" ");
          text(interval && cell > 5.8 * view.counts[row][k].length + 4 ? view.counts[row][k] : count, 14, 10.5);
        }
      });
    });
  };

  const KINDS = { xy, rows, grid };

  const select = (bar, words, names, picked, change) => {
    const label = html("label", bar, { textContent: words });
    const box = html("select", label);
    names.forEach((name, place) => html("option", box, { value: String(place), textContent: name, selected: place === picked }));
    box.addEventListener("change", () => change(Number(box.value)));
  };

  const mount = (figure, spec) => {
    const state = { by: spec.picked || 0, x: spec.across || 0, view: 0, hidden: new Set() };
    const bar = figure.querySelector(".controls"), plot = figure.querySelector(".plot");
    const draw = (width = plot.clientWidth) => { plot.replaceChildren(); hide(); KINDS[spec.kind](spec, state, plot, Math.max(280, width)); };
    const toggle = (name, words, variable) => {
      const key = html("button", bar, { type: "button", className: "key" });
      html("i", key).style.background = `var(${variable})`;
      html("span", key, { textContent: words });
      key.setAttribute("aria-pressed", String(!state.hidden.has(name)));
      key.addEventListener("click", () => {
        if (!state.hidden.delete(name)) state.hidden.add(name);
        key.setAttribute("aria-pressed", String(!state.hidden.has(name)));
        draw();
      });
    };
    const controls = () => {
      bar.replaceChildren();
      if (spec.kind === "grid" && spec.views.length > 1) select(bar, spec.pick, spec.views.map((view) => view.name), state.view, (place) => { state.view = place; draw(); });
      if (spec.kind === "xy" && spec.x.length > 1) select(bar, "across", spec.x.map((axis) => axis.label), state.x, (place) => { state.x = place; draw(); });
      if (spec.kind === "xy") {
        if (spec.by.length > 1) select(bar, "colour", spec.by, state.by, (place) => { state.by = place; state.hidden.clear(); controls(); draw(); });
        const { names, counts, colour } = colours_of(spec.items, state.by);
        for (const name of names) toggle(name, `${name.replaceAll("_", " ")} (${counts.get(name)})`, colour.get(name));
      }
      if (spec.kind === "rows" && spec.legend)
        for (const name of new Set(spec.rows.map((row) => row.c))) toggle(name, name, STATUS[name]);
    };
    controls();
    draw();
    return draw;
  };

  return { mount };
})();
