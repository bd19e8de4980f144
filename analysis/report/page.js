/* What moves on a report's page: figures, the theme, tables that sort and filter, commands that copy. */
(() => {
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const drawn = [...document.querySelectorAll("figure[data-chart]")].map((figure) => Charts.mount(figure, specs[figure.dataset.chart]));
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) drawn.forEach((draw) => draw());
    width = window.innerWidth;
  });
  window.addEventListener("beforeprint", () => drawn.forEach((draw) => draw(680)));
  window.addEventListener("afterprint", () => drawn.forEach((draw) => draw()));

  const theme = document.getElementById("theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const root = document.documentElement, dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  });

  for (const button of document.querySelectorAll(".command button")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const code = button.parentElement.querySelector("code");
      const chosen = window.getSelection();
      chosen.selectAllChildren(code);
      const copied = navigator.clipboard ? navigator.clipboard.writeText(code.textContent) : Promise.reject(new Error("no clipboard"));
      copied.then(() => { button.textContent = "copied"; }, () => { button.textContent = "selected"; });
    });
  }

  const value = (cell) => (cell.dataset.v === undefined ? cell.textContent : cell.dataset.v === "" ? null : Number(cell.dataset.v));
  const compare = (a, b) => (a === null) - (b === null) || (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
  for (const table of document.querySelectorAll("table.sorts")) {
    const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], first = [...body.rows];
    heads.forEach((head, place) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = first.slice().sort((a, b) => {
          const [left, right] = [value(a.cells[place]), value(b.cells[place])];
          return left === null || right === null ? compare(left, right) : down ? compare(right, left) : compare(left, right);
        });
        body.append(...rows);
      });
    });
    const find = document.createElement("div");
    find.className = "controls";
    const label = document.createElement("label"), input = document.createElement("input"), count = document.createElement("span");
    label.className = "find";
    label.textContent = "filter";
    input.type = "search";
    input.placeholder = "e.g. rotary, pruned";
    count.setAttribute("role", "status");
    label.append(input);
    find.append(label, count);
    table.closest(".scroll").before(find);
    const texts = first.map((row) => row.textContent.toLowerCase());
    const filter = () => {
      const words = input.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
      first.forEach((row, place) => { row.hidden = !words.every((word) => texts[place].includes(word)); });
      count.textContent = `${first.filter((row) => !row.hidden).length} of ${first.length} rows`;
    };
    input.addEventListener("input", filter);
    filter();
  }
})();
