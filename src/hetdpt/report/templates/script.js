"use strict";
(() => {
  const all = (query, root = document) => [...root.querySelectorAll(query)];
  const root = document.documentElement;

  // Light and dark: as the system has it, until somebody presses the button.
  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const showTheme = () => {
    theme.setAttribute("aria-pressed", String(isDark()));
    theme.textContent = isDark() ? "Light" : "Dark";
  };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  // Hints: the title of a mark is shown beside it, for mouse, finger and keyboard.
  const tip = document.getElementById("tip");
  for (const mark of all(".mark")) {
    const title = mark.querySelector("title");
    mark.dataset.tip = title.textContent;
    mark.setAttribute("aria-label", title.textContent.replaceAll("\n", ", "));
    mark.setAttribute("tabindex", "-1");
    title.remove();
  }
  for (const picture of all(".picture")) picture.querySelector(".mark")?.setAttribute("tabindex", "0");

  let shown = null;
  const hide = () => { shown = null; tip.hidden = true; };
  const place = () => {
    if (!shown) return;
    const box = shown.getBoundingClientRect(), above = box.top - tip.offsetHeight - 10;
    const left = box.left + box.width / 2 - tip.offsetWidth / 2;
    tip.style.left = `${Math.max(8, Math.min(left, root.clientWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${above > 8 ? above : box.bottom + 10}px`;
  };
  const show = (mark) => {
    shown = mark;
    tip.replaceChildren(...mark.dataset.tip.split("\n").map((text, number) => {
      const row = document.createElement(number ? "span" : "b");
      row.textContent = text;
      return row;
    }));
    tip.hidden = false;
    place();
  };
  const markOf = (event) => event.target.closest?.(".mark");
  for (const kind of ["pointerover", "focusin", "click"]) {
    document.addEventListener(kind, (event) => (markOf(event) ? show(markOf(event)) : hide()));
  }
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", place, { passive: true, capture: true });

  // Arrows go to the next mark in their direction; a picture is one stop of the tabulator.
  const WAYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const centre = (mark) => {
    const box = mark.getBoundingClientRect();
    return [box.left + box.width / 2, box.top + box.height / 2];
  };
  const nextOf = (mark, [right, down]) => {
    const [x, y] = centre(mark);
    let best = null, least = Infinity;
    for (const other of all(".mark", mark.closest(".picture"))) {
      const [u, v] = centre(other);
      const along = (u - x) * right + (v - y) * down;
      const aside = Math.abs((u - x) * down) + Math.abs((v - y) * right);
      const far = along + 3 * aside;
      if (along > 0.5 && far < least && other.getClientRects().length) [best, least] = [other, far];
    }
    return best;
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    const mark = markOf(event), way = WAYS[event.key];
    if (!mark || !way) return;
    event.preventDefault();
    const next = nextOf(mark, way);
    if (!next) return;
    mark.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });

  // Buttons show and hide the series of their figure.
  for (const button of all("[data-toggles]")) {
    button.addEventListener("click", () => {
      const isShown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(isShown));
      for (const part of all("[data-series]", button.closest("figure"))) {
        if (part.dataset.series === button.dataset.toggles) part.classList.toggle("is-hidden", !isShown);
      }
    });
  }

  // Picking a point shows what is known of it; without a script all points are shown.
  const picked = document.getElementById("picked");
  const pick = (key) => {
    const chosen = [...picked.children].find((one) => one.id === key);
    if (!chosen) return;
    for (const one of picked.children) one.hidden = one !== chosen;
    for (const one of all("[data-picks]")) {
      const isChosen = one.dataset.picks === key;
      one.classList.toggle("picked", isChosen);
      if (one.getAttribute("role") === "button") one.setAttribute("aria-pressed", String(isChosen));
    }
    reach();
  };
  if (picked) {
    document.addEventListener("click", (event) => {
      const one = event.target.closest?.("[data-picks]");
      if (!one) return;
      const wasInside = picked.contains(one);
      history.replaceState(null, "", `#${one.dataset.picks}`);
      pick(one.dataset.picks);
      if (wasInside) picked.querySelector("article:not([hidden]) [data-picks]").focus({ preventScroll: true });
    });
    document.addEventListener("keydown", (event) => {
      const mark = markOf(event);
      if (!mark?.dataset.picks || !["Enter", " "].includes(event.key)) return;
      event.preventDefault();
      mark.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    });
  }

  // A button copies the command beside it; where that is not allowed the command is selected.
  for (const button of all("[data-copies]")) {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      getSelection().selectAllChildren(code);
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  // What scrolls inside the page can be reached by keyboard.
  const reach = () => {
    for (const box of all(".scroll, pre")) {
      if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0; else box.removeAttribute("tabindex");
    }
  };
  addEventListener("resize", reach);
  reach();
  if (picked) {
    pick(picked.dataset.first);
    pick(location.hash.slice(1));
  }

  addEventListener("beforeprint", () => { for (const part of all("details.run")) part.open = true; });

  const download = document.getElementById("download");
  download.addEventListener("click", () => {
    const text = JSON.stringify(JSON.parse(document.getElementById("data").textContent), null, 1);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = download.dataset.file;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
})();
