//! Which functions have code, and why one can't be attached to: what `/proc/kallsyms` and ftrace's list say of it.
//!
//! These lists are long, and the kernel makes them up as they are read. Kallsyms is read once for the kernel's own
//! functions and once for a look-up in modules, ftrace's list only to explain a failure.

use std::cell::OnceCell;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use super::{BTF_DIR, VMLINUX};
use crate::error::NotTraceable;

pub(super) const KALLSYMS: &str = "/proc/kallsyms";

/// Where tracefs is mounted: its own place, or the older one within debugfs.
const FTRACE_LISTS: [&str; 2] =
    ["/sys/kernel/tracing/available_filter_functions", "/sys/kernel/debug/tracing/available_filter_functions"];

/// The functions that have code.
///
/// Where kallsyms can't be read, or is masked, as in a container, there are none, and nothing is claimed of any.
#[derive(Debug, Default)]
pub(super) struct Symbols {
    kernel: OnceCell<Arc<Names>>,
    modules: OnceCell<Names>,
}

/// What is known of a name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Known {
    /// The modules of the functions of exactly this name; `None`: the kernel itself.
    modules: Vec<Option<String>>,
    /// What the compiler left of it under other names, such as `function.isra.0`.
    variants: Vec<String>,
}

/// How a function of a BTF stands to the symbols.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Code {
    /// There is no telling.
    Unknown,
    /// This many functions have the name.
    Copies(usize),
    /// None has it, for this reason.
    Missing(NotTraceable),
}

impl Symbols {
    /// The kernel's own functions. They don't change, so they are read once for the process.
    fn kernel(&self) -> &Names {
        static KERNEL: OnceLock<Arc<Names>> = OnceLock::new();
        let read = || {
            let (kernel, modules) = read_kallsyms(true);
            // As they have been read anyway.
            let _ = self.modules.set(modules);
            Arc::new(kernel)
        };
        self.kernel.get_or_init(|| Arc::clone(KERNEL.get_or_init(read)))
    }

    /// The functions of modules, as they are when this is first asked for.
    fn modules(&self) -> &Names {
        // The kernel's come first: if they have to be read, these are read with them.
        self.kernel();
        self.modules.get_or_init(|| read_kallsyms(false).1)
    }

    /// Whether a function of the kernel itself has code, and how many have its name: it attaches to one of them, and
    /// doesn't say which.
    pub(super) fn code_in_kernel(&self, function: &str) -> Code {
        if self.kernel().is_empty() { Code::Unknown } else { Known::of(function, [self.kernel()]).code() }
    }

    /// The same for a function of a module, where either only that module counts or every function of the name.
    pub(super) fn code_in_module(&self, module: &str, function: &str, only_there: bool) -> Code {
        if self.modules().is_empty() {
            return Code::Unknown;
        }
        let here = Known::of(function, [self.modules()]).within(module);
        match here.code() {
            Code::Copies(_) if !only_there => Code::Copies(self.everywhere(function).modules.len()),
            code => code,
        }
    }

    fn everywhere(&self, function: &str) -> Known {
        Known::of(function, [self.kernel(), self.modules()])
    }

    /// Why a function that the kernel may well have is in no BTF; `None`: it doesn't have it, or not in that module.
    pub(super) fn why_not_in_btf(&self, module: Option<&str>, function: &str) -> Option<NotTraceable> {
        let known = match module {
            Some(module) => self.everywhere(function).within(module),
            None => self.everywhere(function),
        };
        match known.modules.first() {
            Some(Some(module)) if !Path::new(BTF_DIR).join(module).exists() => {
                Some(NotTraceable::ModuleWithoutBtf { module: module.clone() })
            }
            Some(None) if in_ftrace_list(None, function) == Some(false) => Some(NotTraceable::Excluded),
            Some(_) => Some(NotTraceable::Untyped),
            None => known.optimised(),
        }
    }
}

impl Known {
    fn of<const N: usize>(function: &str, lists: [&Names; N]) -> Self {
        let mut known = Self::default();
        for entry in lists.into_iter().flat_map(|names| names.beginning_with(function)) {
            let (name, module) = split(entry);
            if name.len() == function.len() {
                known.modules.push(module.map(str::to_owned));
            } else if name.as_bytes().get(function.len()) == Some(&b'.') {
                known.variants.push(entry.to_owned());
            }
        }
        known
    }

    /// What of it is in this module, or in the kernel itself as `vmlinux`.
    fn within(mut self, wanted: &str) -> Self {
        let is_wanted = |module: Option<&str>| module.unwrap_or(VMLINUX) == wanted;
        self.modules.retain(|module| is_wanted(module.as_deref()));
        self.variants.retain(|entry| is_wanted(split(entry).1));
        self
    }

    fn code(self) -> Code {
        match self.modules.len() {
            0 => Code::Missing(self.optimised().unwrap_or(NotTraceable::Inlined)),
            copies => Code::Copies(copies),
        }
    }

    fn optimised(self) -> Option<NotTraceable> {
        let names = self.variants.iter().map(|entry| split(entry).0);
        // What is never or rarely run is put apart; the function itself is elsewhere.
        let symbols: Vec<_> = names.filter(|name| !name.ends_with(".cold")).map(str::to_owned).collect();
        (!symbols.is_empty()).then_some(NotTraceable::OptimisedVariant { symbols })
    }
}

/// Many names, sorted: `FUNCTION`, or `FUNCTION`, a tab, and the module. What is there twice is in it twice.
#[derive(Debug, Default)]
struct Names {
    text: String,
    /// Where in `text` each name is.
    at: Vec<Range<u32>>,
}

impl Names {
    fn push(&mut self, function: &str, module: Option<&str>) {
        let start = self.text.len() as u32;
        self.text.push_str(function);
        if let Some(module) = module {
            self.text.push('\t');
            self.text.push_str(module);
        }
        self.at.push(start..self.text.len() as u32);
    }

    fn sort(&mut self) {
        let Self { text, at } = self;
        at.sort_unstable_by_key(|range| name_at(text, range));
        text.shrink_to_fit();
        at.shrink_to_fit();
    }

    fn is_empty(&self) -> bool {
        self.at.is_empty()
    }

    /// All names of which `prefix` is the beginning, up to a tab or a dot.
    fn beginning_with(&self, prefix: &str) -> impl Iterator<Item = &str> {
        let first = self.at.partition_point(|range| name_at(&self.text, range) < prefix);
        let names = self.at[first..].iter().map(|range| name_at(&self.text, range));
        // In the order of characters both come before all that names are made of.
        names.take_while(move |name| name.strip_prefix(prefix).is_some_and(|rest| rest < "/"))
    }
}

fn name_at<'a>(text: &'a str, range: &Range<u32>) -> &'a str {
    &text[range.start as usize..range.end as usize]
}

/// The function and the module of an entry of [`Names`].
pub(super) fn split(entry: &str) -> (&str, Option<&str>) {
    entry.split_once('\t').map_or((entry, None), |(name, module)| (name, Some(module)))
}

/// The functions of the kernel itself, if they are wanted, and those of its modules; none where they can't be read.
fn read_kallsyms(kernel_too: bool) -> (Names, Names) {
    let Ok(file) = File::open(KALLSYMS) else { return Default::default() };
    parse(BufReader::with_capacity(1 << 16, file), kernel_too)
}

/// Lines are `ADDRESS TYPE NAME`, in modules followed by a tab and `[MODULE]`.
fn parse(mut kallsyms: impl BufRead, kernel_too: bool) -> (Names, Names) {
    let (mut kernel, mut modules) = (Names::default(), Names::default());
    let mut line = Vec::new();
    while kallsyms.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
        let mut words = std::str::from_utf8(&line).unwrap_or_default().split_ascii_whitespace().skip(1);
        if let (Some("t" | "T" | "w" | "W"), Some(name)) = (words.next(), words.next()) {
            match words.next() {
                Some(module) => modules.push(name, Some(module.trim_matches(['[', ']']))),
                None if kernel_too => kernel.push(name, None),
                None => {}
            }
        }
        line.clear();
    }
    kernel.sort();
    modules.sort();
    (kernel, modules)
}

/// Why the kernel didn't attach to a function that it has; `None`: ftrace's list doesn't tell.
pub(crate) fn why_not_attached(module: Option<&str>, function: &str) -> Option<NotTraceable> {
    (in_ftrace_list(module, function) == Some(false)).then_some(NotTraceable::Excluded)
}

/// Whether ftrace lists the function; `None` where its list can't be read (not mounted, not root, locked down).
fn in_ftrace_list(module: Option<&str>, function: &str) -> Option<bool> {
    let list = FTRACE_LISTS.iter().find_map(|path| File::open(path).ok())?;
    is_listed(BufReader::new(list), module, function)
}

/// Lines are `FUNCTION`, in modules followed by `[MODULE]`.
fn is_listed(list: impl BufRead, module: Option<&str>, function: &str) -> Option<bool> {
    let mut lines = list.lines().map_while(Result::ok).peekable();
    lines.peek()?;
    Some(lines.any(|line| {
        let mut words = line.split_ascii_whitespace();
        words.next() == Some(function) && words.next().map(|module| module.trim_matches(['[', ']'])) == module
    }))
}

#[cfg(any(test, fuzzing))]
impl Symbols {
    /// From a text like that of `/proc/kallsyms`.
    pub(super) fn canned(kallsyms: impl AsRef<[u8]>) -> Self {
        let (kernel, modules) = parse(kallsyms.as_ref(), true);
        Self { kernel: OnceCell::from(Arc::new(kernel)), modules: OnceCell::from(modules) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KALLSYMS: &str = "\
0000000000000000 T ip_rcv
0000000000000000 t ip_rcv_core
0000000000000000 t ip_rcv_finish.isra.0
0000000000000000 t ip_rcv_finish.isra.0.cold
0000000000000000 t ip_rcv_core.cold
0000000000000000 t ip_rcv_gone.cold
0000000000000000 d ip_rcv_data
0000000000000000 t state_show
0000000000000000 W state_show
0000000000000000 t nf_hook_entry_head\t[nf_tables]
0000000000000000 t help\t[nf_nat]
0000000000000000 t help.constprop.0\t[nft_ct]
0000000000000000 t state_show\t[bonding]
0000000000000000 t no_such_btf\t[no_such_module]
";

    fn variants(symbols: &[&str]) -> NotTraceable {
        NotTraceable::OptimisedVariant { symbols: symbols.iter().map(|&symbol| symbol.to_owned()).collect() }
    }

    /// A name's code, its copies and what the compiler made of it are told apart.
    #[test]
    fn knows_code_in_the_kernel() {
        let symbols = Symbols::canned(KALLSYMS);
        assert_eq!(symbols.code_in_kernel("ip_rcv"), Code::Copies(1));
        assert_eq!(symbols.code_in_kernel("ip_rcv_core"), Code::Copies(1), "its cold part is no copy");
        assert_eq!(symbols.code_in_kernel("state_show"), Code::Copies(2));
        assert_eq!(symbols.code_in_kernel("ip_rcv_finish"), Code::Missing(variants(&["ip_rcv_finish.isra.0"])));
        for inlined in ["ip_rcv_gone", "ip_rcv_data", "ip_rc", "no_such", "help", "a", "z"] {
            assert_eq!(symbols.code_in_kernel(inlined), Code::Missing(NotTraceable::Inlined), "{inlined}");
        }
    }

    /// Every underscore is part of the name.
    #[test]
    fn leading_underscores() {
        let symbols =
            Symbols::canned("0 T __pskb_trim\n0 t ____sys_recvmsg\n0 t ___pskb_trim\n0 t ___pskb_trim.cold\n");
        for name in ["__pskb_trim", "___pskb_trim", "____sys_recvmsg"] {
            assert_eq!(symbols.code_in_kernel(name), Code::Copies(1), "{name}");
        }
        assert_eq!(symbols.code_in_kernel("_pskb_trim"), Code::Missing(NotTraceable::Inlined));
    }

    /// Of a module's functions either those in it count, or all of the name.
    #[test]
    fn knows_code_in_modules() {
        let symbols = Symbols::canned(KALLSYMS);
        assert_eq!(symbols.code_in_module("bonding", "state_show", true), Code::Copies(1));
        assert_eq!(symbols.code_in_module("bonding", "state_show", false), Code::Copies(3));
        assert_eq!(symbols.code_in_module("nf_nat", "help", false), Code::Copies(1));
        assert_eq!(symbols.code_in_module("nft_ct", "help", false), Code::Missing(variants(&["help.constprop.0"])));
        assert_eq!(symbols.code_in_module("nf_nat", "ip_rcv", true), Code::Missing(NotTraceable::Inlined));
    }

    /// A masked list claims nothing.
    #[test]
    fn knows_when_it_does_not_know() {
        let symbols = Symbols::canned("");
        assert_eq!(symbols.code_in_kernel("ip_rcv"), Code::Unknown);
        assert_eq!(symbols.code_in_module("m", "f", true), Code::Unknown);
        assert_eq!(symbols.why_not_in_btf(None, "ip_rcv"), None);
    }

    /// What has code and isn't in BTF.
    #[test]
    fn explains_what_btf_lacks() {
        let symbols = Symbols::canned(KALLSYMS);
        let reason = NotTraceable::ModuleWithoutBtf { module: "no_such_module".to_owned() };
        assert_eq!(symbols.why_not_in_btf(None, "no_such_btf"), Some(reason.clone()));
        assert_eq!(symbols.why_not_in_btf(Some("no_such_module"), "no_such_btf"), Some(reason));
        assert_eq!(symbols.why_not_in_btf(Some("bonding"), "no_such_btf"), None);
        assert_eq!(symbols.why_not_in_btf(Some("vmlinux"), "help"), None);
        assert_eq!(symbols.why_not_in_btf(None, "ip_rcv_finish"), Some(variants(&["ip_rcv_finish.isra.0"])));
        assert_eq!(symbols.why_not_in_btf(None, "ip_rcv_gone"), None);
    }

    /// ftrace's list has the same name in the kernel and in modules.
    #[test]
    fn reads_ftrace_list() {
        let list = "ip_rcv\nhelp [nf_nat]\n";
        let is_listed = |module, function| is_listed(list.as_bytes(), module, function);
        assert_eq!(is_listed(None, "ip_rcv"), Some(true));
        assert_eq!(is_listed(Some("nf_nat"), "ip_rcv"), Some(false));
        assert_eq!(is_listed(Some("nf_nat"), "help"), Some(true));
        assert_eq!(is_listed(None, "help"), Some(false));
        assert_eq!(super::is_listed(&b""[..], None, "ip_rcv"), None, "it is masked");
    }

    /// On the kernel that runs the test: a function that there is has code.
    #[test]
    fn reads_this_kernel() {
        let known = Symbols::default().code_in_kernel("ip_rcv");
        assert!(matches!(known, Code::Copies(1) | Code::Unknown), "{known:?}");
    }
}
