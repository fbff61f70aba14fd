// Where `heedful serve` serves this documentation, links to the playground lead to the same server.
if (location.pathname.startsWith("/docs/")) {
  document.addEventListener("DOMContentLoaded", () => {
    for (const link of document.querySelectorAll("a.playground-link")) {
      link.href = "/" + new URL(link.href).hash;
    }
  });
}
