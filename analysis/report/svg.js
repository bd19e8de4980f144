"use strict";
/* Parts that all figures share: elements, scales, axes, and what hovering tells. */
const Svg = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const tip = document.getElementById("tip");

  const make = (tag, attributes = {}, parent = null, text = "") => {
    const element = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== "") element.textContent = text;
    if (parent) parent.appendChild(element);
    return element;
  };
  const html = (tag, parent, properties = {}) => parent.appendChild(Object.assign(document.createElement(tag), properties));
  const paint = (element, variable, property = "fill") => { element.style[property] = `var(${variable})`; return element; };
  const fixed = (value, digits) => value.toFixed(digits).replace(/^-(?=0\.?0*$)/, "").replace("-", "−");
  const short = (value, digits = 3) => {
    const size = Math.abs(value);
    for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (size >= unit * 0.9995) return `${+(value / unit).toPrecision(digits)}${letter}`;
    return size && size < 0.001 ? value.toExponential(1).replace(".0e", "e") : `${+value.toPrecision(digits)}`;
  };

  const linear = (low, high, from, to, most) => {
    const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= raw);
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(k * step);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const enough = Math.max(3, Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / step)) + 1);
    const name = (value) => (Math.abs(value) >= 1000 ? short(value, enough) : fixed(value || 0, digits));
    const at = (value) => from + ((value - low) / (high - low)) * (to - from);
    return { at, ticks, name };
  };
  const logarithmic = (low, high, from, to, most) => {
    const [a, b] = [Math.log10(low), Math.log10(high)];
    let ticks = [];
    for (const factors of [[1, 2, 3, 5], [1, 3], [1]]) {
      ticks = [];
      for (let power = Math.floor(a); power <= b; power++)
        for (const k of factors) if (k * 10 ** power >= low * 0.999 && k * 10 ** power <= high * 1.001) ticks.push(k * 10 ** power);
      if (ticks.length <= most) break;
    }
    return { at: (value) => from + ((Math.log10(value) - a) / (b - a)) * (to - from), ticks, name: (value) => short(value) };
  };
  const spread = (low, high, share) => {
    const room = (high - low || Math.abs(high) || 1) * share;
    return [low - room, high + room];
  };
  const quantile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];

  /* The losses told apart best: what lies beyond Tukey's far fence is left out of view. */
  const robust = (values, levels) => {
    const sorted = values.slice().sort((a, b) => a - b);
    const [quarter, three] = [quantile(sorted, 0.25), quantile(sorted, 0.75)];
    const top = Math.min(sorted[sorted.length - 1], three + 3 * (three - quarter || sorted[sorted.length - 1] - three));
    return spread(Math.min(sorted[0], ...levels), Math.max(top, ...levels), 0.06);
  };

  const frame = (plot, width, height, label) =>
    plot.appendChild(make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }));

  const point_at = (svg, spots, event, reach) => {
    const box = svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = null, least = reach * reach;
    for (const spot of spots) {
      const far = (spot.x - x) ** 2 + (spot.y - y) ** 2;
      if (far < least) [best, least] = [spot, far];
    }
    return best;
  };
  const show = (words, event) => {
    tip.textContent = words;
    tip.hidden = false;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(event.pageX + 14, window.scrollX + room))}px`;
    tip.style.top = `${event.pageY + 16}px`;
  };
  const hide = () => { tip.hidden = true; };

  /* Hovering: the nearest spot is told, and lit up. */
  const follow = (svg, spots, light, reach = 40) => {
    const move = (event) => {
      const spot = point_at(svg, spots, event, reach);
      light(spot);
      if (spot) show(spot.words, event); else hide();
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", () => { light(null); hide(); });
  };

  const axes = (svg, area, x, y, spec_x, spec_y) => {
    for (const tick of y.ticks) {
      make("line", { class: "grid", x1: area.left, x2: area.right, y1: y.at(tick), y2: y.at(tick) }, svg);
      make("text", { class: "soft", x: area.left - 6, y: y.at(tick) + 4, "text-anchor": "end" }, svg, y.name(tick));
    }
    for (const tick of x.ticks) {
      make("line", { class: "grid", x1: x.at(tick), x2: x.at(tick), y1: area.top, y2: area.bottom }, svg);
      make("text", { class: "soft", x: x.at(tick), y: area.bottom + 16, "text-anchor": "middle" }, svg, x.name(tick));
    }
    make("line", { class: "axis", x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }, svg);
    make("text", { x: (area.left + area.right) / 2, y: area.bottom + 34, "text-anchor": "middle" }, svg, spec_x);
    make("text", { x: 2, y: 12 }, svg, spec_y);
  };

  return { make, html, paint, fixed, short, linear, logarithmic, spread, robust, frame, show, hide, follow, axes };
})();
