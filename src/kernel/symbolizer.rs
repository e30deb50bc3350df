//! Which of the kernel's functions an address is in: what `/proc/kallsyms` says of it.
//!
//! The list is read when the first probe needs it, and goes with the last. Where addresses are hidden from this process
//! (`kernel.kptr_restrict`, no `CAP_SYSLOG`), they are all 0, and nothing is claimed of any.

use std::fmt;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher as _};
use std::io::{BufRead, BufReader};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::preempt::VARIABLES;
use super::symbols::{KALLSYMS, split};
use crate::name::Name;

/// How often it is looked whether modules have come or gone, at most. It takes reading one small file.
const LOOK: Duration = Duration::from_secs(1);
/// How often all is read again for an address that isn't known, at most: it takes some 50 ms. Twice as long after each
/// time that it was of no use,
const READ: Duration = Duration::from_secs(1);
/// and no longer than this.
const READ_AT_LEAST: Duration = Duration::from_secs(64);
/// Where the next function is another module's, nothing tells where one ends. Nearly all are shorter than this.
const LONGEST_LAST: u64 = 4096;
/// Here the kernel's own code ends; it is listed like a function.
const END_OF_CODE: &str = "_etext";

/// A place in the kernel's code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Symbol {
    /// The function, as the compiler has it, which may have left parts of one under names such as `function.cold`.
    pub name: Name,
    /// `None`: in the kernel itself. `bpf`: an eBPF program.
    pub module: Option<Name>,
    /// Bytes from where it begins.
    pub offset: u64,
}

/// As in the kernel's own messages: `nf_hook_slow+0x8a`, `nft_do_chain+0x1f [nf_tables]`.
impl fmt::Display for Symbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, module, offset } = self;
        write!(f, "{name}+{offset:#x}")?;
        module.map_or(Ok(()), |module| write!(f, " [{module}]"))
    }
}

impl Symbol {
    /// The function that it is of, as [`Function`](super::Function) is written: without what the compiler has appended.
    pub(crate) fn function(&self) -> Name {
        let name = self.name.as_str();
        let own = name.find('.').filter(|&dot| dot > 0).map_or(name, |dot| &name[..dot]);
        match self.module {
            Some(module) => Name::from(&*format!("{module}:{own}")),
            None if own.len() == name.len() => self.name,
            None => Name::from(own),
        }
    }
}

/// Looks addresses up.
pub(crate) struct Symbolizer {
    source: Source,
    held: Mutex<Held>,
}

/// Where it is read from.
struct Source {
    kallsyms: Box<dyn Fn() -> Table + Send + Sync>,
    /// What differs when other modules are loaded.
    modules: Box<dyn Fn() -> u64 + Send + Sync>,
}

/// What was read, and when it will be time to do so again.
struct Held {
    table: Table,
    modules: u64,
    next_look: Instant,
    next_reading: Instant,
    pause: Duration,
}

impl Symbolizer {
    /// The one that all probes share. Reads the list, unless another probe has.
    pub(crate) fn shared() -> Arc<Self> {
        static SHARED: Mutex<Weak<Symbolizer>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let source = Source { kallsyms: Box::new(read_kallsyms), modules: Box::new(read_modules) };
            let new = Arc::new(Self::new(source, Instant::now()));
            *shared = Arc::downgrade(&new);
            new
        })
    }

    fn new(source: Source, now: Instant) -> Self {
        // The modules first: what comes meanwhile makes it read once more, instead of being missed.
        let modules = (source.modules)();
        let table = (source.kallsyms)();
        let held = Held { table, modules, next_look: now + LOOK, next_reading: now + READ, pause: READ };
        Self { source, held: Mutex::new(held) }
    }

    /// What is at an address; `None`: no function, or there is no telling.
    ///
    /// Takes a lock, and reads files if modules may have come since that was done last.
    pub(crate) fn resolve(&self, address: u64) -> Option<Symbol> {
        self.resolve_at(address, Instant::now())
    }

    /// What a function was called from that returns to this address.
    ///
    /// The call comes before it. It may be the last instruction of its function, and what follows another's first.
    pub(crate) fn resolve_caller(&self, return_address: u64) -> Option<Symbol> {
        self.resolve(return_address.wrapping_sub(1))
    }

    /// The same, as stacks are written: the place to which it returns, within the function that has called.
    pub(crate) fn resolve_return(&self, return_address: u64) -> Option<Symbol> {
        let caller = self.resolve_caller(return_address)?;
        Some(Symbol { offset: caller.offset + 1, ..caller })
    }

    /// The address of a variable of the kernel, or what it is counted from each CPU's own memory; of those in `VARIABLES`.
    pub(crate) fn variable(&self, name: &str) -> Option<u64> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.table.variables.iter().find(|(variable, _)| *variable == name).map(|&(_, address)| address)
    }

    /// To be called once programs were attached, which have symbols, too. Reads all again.
    pub(crate) fn note_programs(&self) {
        // Others may look addresses up meanwhile.
        let table = (self.source.kallsyms)();
        self.held.lock().unwrap_or_else(PoisonError::into_inner).replace(table);
    }

    /// Where a function begins. Takes a millisecond.
    pub(crate) fn address_of(&self, name: &str, module: Option<&str>) -> Option<u64> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).table.address_of(name, module)
    }

    fn resolve_at(&self, address: u64, now: Instant) -> Option<Symbol> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let found = held.table.find(address);
        // What is in the kernel itself stays where it is. Modules come and go, and another's code takes the place.
        let stays = found.is_some_and(|symbol| symbol.module.is_none());
        // Known ones mustn't take each look away from those that aren't.
        let due = if found.is_some() { held.next_look } else { held.next_look.min(held.next_reading) };
        if stays || now < due || !self.read_again(&mut held, found.is_some(), now) {
            return found;
        }
        let found = held.table.find(address);
        held.pause = if found.is_some() { READ } else { (held.pause * 2).min(READ_AT_LEAST) };
        held.next_reading = now + held.pause;
        found
    }

    /// Whether that was called for.
    fn read_again(&self, held: &mut Held, known: bool, now: Instant) -> bool {
        held.next_look = now + LOOK;
        let modules = (self.source.modules)();
        // Programs of BPF have symbols and aren't among the modules.
        if modules == held.modules && (known || now < held.next_reading) {
            return false;
        }
        held.modules = modules;
        held.replace((self.source.kallsyms)());
        true
    }
}

impl Held {
    fn replace(&mut self, table: Table) {
        if table.addresses.is_empty() {
            // This process has given up its privileges since. What the kernel itself has is still true.
            self.table.forget_modules();
        } else {
            self.table = table;
        }
    }
}

impl fmt::Debug for Symbolizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Symbolizer").finish_non_exhaustive()
    }
}

fn read_kallsyms() -> Table {
    File::open(KALLSYMS).map(|file| Table::parse(BufReader::with_capacity(1 << 16, file))).unwrap_or_default()
}

fn read_modules() -> u64 {
    let mut hasher = DefaultHasher::new();
    for line in fs::read_to_string("/proc/modules").unwrap_or_default().lines() {
        let mut words = line.split_ascii_whitespace();
        // Name, size and address. How often a module is used changes without it.
        for word in [words.next(), words.next(), words.nth(3)].into_iter().flatten() {
            hasher.write(word.as_bytes());
        }
    }
    hasher.finish()
}

/// Functions by their addresses: some 3 MB.
#[derive(Debug, Default)]
struct Table {
    /// Sorted.
    addresses: Vec<u64>,
    /// Where in `text` each has its name, or [`NOT_CODE`].
    names: Vec<u32>,
    /// `FUNCTION`, or `FUNCTION`, a tab, and the module; each ends with a newline.
    text: String,
    /// Addresses of some that are no functions.
    variables: Vec<(&'static str, u64)>,
}

/// What is written in the place of a module for eBPF programs, and for what calls them.
pub(crate) const PROGRAMS: &str = "bpf";
/// In the place of a name: from this address on there is something else.
const NOT_CODE: u32 = u32::MAX;

impl Table {
    /// Lines are `ADDRESS TYPE NAME`, in modules followed by a tab and `[MODULE]`.
    fn parse(mut kallsyms: impl BufRead) -> Self {
        let mut text = String::new();
        let mut entries: Vec<(u64, u32)> = Vec::new();
        let mut end_of_code = None;
        let mut variables = Vec::new();
        let mut line = Vec::new();
        while kallsyms.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
            let mut words = std::str::from_utf8(&line).unwrap_or_default().split_ascii_whitespace();
            let address = words.next().and_then(|word| u64::from_str_radix(word, 16).ok()).unwrap_or(0);
            let is_code = matches!(words.next(), Some("t" | "T" | "w" | "W"));
            match (words.next(), words.next()) {
                _ if address == 0 => {}
                (Some(END_OF_CODE), None) => end_of_code = Some(address),
                (Some(name), module) if is_code => {
                    entries.push((address, text.len() as u32));
                    text.push_str(name);
                    if let Some(module) = module {
                        text.push('\t');
                        text.push_str(module.trim_matches(['[', ']']));
                    }
                    text.push('\n');
                }
                (name, module) => {
                    let known = VARIABLES.iter().find(|&&variable| name == Some(variable) && module.is_none());
                    variables.extend(known.map(|&variable| (variable, address)));
                    entries.push((address, NOT_CODE));
                }
            }
            line.clear();
        }
        entries.extend(end_of_code.map(|address| (address, NOT_CODE)));
        // Of several names for one place the kernel lists the best first.
        entries.sort_by_key(|&(address, name)| (address, end_of_code != Some(address) && name == NOT_CODE));
        if let Some(end) = end_of_code {
            entries.iter_mut().filter(|(address, _)| *address == end).for_each(|(_, name)| *name = NOT_CODE);
        }
        entries.dedup_by_key(|&mut (address, _)| address);
        // Of what is no code, where it begins is all that matters.
        entries.dedup_by(|(_, name), (_, before)| *name == NOT_CODE && *before == NOT_CODE);
        text.shrink_to_fit();
        let (addresses, names) = entries.into_iter().unzip();
        Self { addresses, names, text, variables }
    }

    fn find(&self, address: u64) -> Option<Symbol> {
        let next = self.addresses.partition_point(|&begin| begin <= address);
        let n = next.checked_sub(1)?;
        let (name, module) = split(self.name(n)?);
        let offset = address - self.addresses.get(n)?;
        // What is behind a program may be one that has come since, or what calls it.
        let goes_on = module != Some(PROGRAMS) && self.name(next).is_some_and(|next| split(next).1 == module);
        (goes_on || offset < LONGEST_LAST).then(|| Symbol { name: name.into(), module: module.map(Name::from), offset })
    }

    fn address_of(&self, name: &str, module: Option<&str>) -> Option<u64> {
        let found = (0..self.names.len()).find(|&n| self.name(n).is_some_and(|line| split(line) == (name, module)));
        self.addresses.get(found?).copied()
    }

    fn forget_modules(&mut self) {
        for n in 0..self.names.len() {
            if self.name(n).is_some_and(|name| split(name).1.is_some()) {
                self.names[n] = NOT_CODE;
            }
        }
    }

    fn name(&self, n: usize) -> Option<&str> {
        self.text.get(*self.names.get(n)? as usize..)?.split('\n').next()
    }
}

#[cfg(any(test, fuzzing))]
impl Symbolizer {
    /// From a text like that of `/proc/kallsyms`.
    pub(crate) fn canned(kallsyms: impl Into<Vec<u8>>) -> Self {
        let kallsyms = kallsyms.into();
        let kallsyms = Box::new(move || Table::parse(&*kallsyms));
        Self::new(Source { kallsyms, modules: Box::new(|| 0) }, Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

    use super::*;

    const KERNEL: &str = "\
0000000000000000 A fixed_percpu_data
ffffffff81000000 T ip_rcv
ffffffff81000000 T _stext
ffffffff81000100 t ip_rcv_core.isra.0
ffffffff81000400 W weak
ffffffff81009000 t __pfx_tcp_v4_rcv
ffffffff81009010 T tcp_v4_rcv
ffffffff8100a000 T __marker_end
ffffffff8100a000 T _etext
ffffffff81010000 D some_data
ffffffff81020000 T init_code
ffffffffc0001000 t help\t[nf_nat]
ffffffffc0001200 r table\t[nf_nat]
ffffffffc0000100 t nft_do_chain\t[nf_tables]
ffffffffc0000400 t nft_last.cold\t[nf_tables]
";

    fn text(symbolizer: &Symbolizer, address: u64) -> Option<String> {
        symbolizer.resolve(address).map(|symbol| symbol.to_string())
    }

    /// The first byte and the last of functions, and what is between and behind them.
    #[test]
    fn finds_functions() {
        let symbols = Symbolizer::canned(KERNEL);
        for (address, expected) in [
            (0xffff_ffff_8100_0000, Some("ip_rcv+0x0")),
            (0xffff_ffff_8100_00ff, Some("ip_rcv+0xff")),
            (0xffff_ffff_8100_0100, Some("ip_rcv_core.isra.0+0x0")),
            // Longer than any last one, and it is known where it ends.
            (0xffff_ffff_8100_8fff, Some("weak+0x8bff")),
            (0xffff_ffff_8100_9fff, Some("tcp_v4_rcv+0xfef")),
            (0xffff_ffff_8100_a000, None),
            (0xffff_ffff_8100_a001, None),
            (0xffff_ffff_8101_0000, None),
            (0xffff_ffff_8102_0fff, Some("init_code+0xfff")),
            (0xffff_ffff_8102_1000, None),
            // Not in order, and two modules are next to each other.
            (0xffff_ffff_c000_03ff, Some("nft_do_chain+0x2ff [nf_tables]")),
            (0xffff_ffff_c000_0fff, Some("nft_last.cold+0xbff [nf_tables]")),
            (0xffff_ffff_c000_1000, Some("help+0x0 [nf_nat]")),
            (0xffff_ffff_c000_1200, None),
            (0xffff_ffff_80ff_ffff, None),
            (0, None),
            (1, None),
            (u64::MAX, None),
        ] {
            assert_eq!(text(&symbols, address).as_deref(), expected, "{address:#x}");
        }
        assert_eq!(symbols.address_of("tcp_v4_rcv", None), Some(0xffff_ffff_8100_9010));
        assert_eq!(symbols.address_of("nft_do_chain", Some("nf_tables")), Some(0xffff_ffff_c000_0100));
        assert_eq!((symbols.address_of("nft_do_chain", None), symbols.address_of("some_data", None)), (None, None));
        let caller = symbols.resolve_caller(0xffff_ffff_8100_0100).unwrap();
        assert_eq!(caller.to_string(), "ip_rcv+0xff", "the call is its last instruction");
        assert_eq!(symbols.resolve_caller(0), None);
    }

    /// The last function of a module isn't taken to reach as far as the next module.
    #[test]
    fn modules_end() {
        let symbols = Symbolizer::canned("ffffc000 t a\t[a]\nffffe000 t b\t[b]\n");
        assert_eq!(text(&symbols, 0xffff_cfff).as_deref(), Some("a+0xfff [a]"));
        assert_eq!(text(&symbols, 0xffff_d000), None);
        assert_eq!(text(&symbols, 0xffff_e000).as_deref(), Some("b+0x0 [b]"));
    }

    /// Functions are written as a user writes them.
    #[test]
    fn names_functions() {
        let symbols = Symbolizer::canned(KERNEL);
        let function = |address| symbols.resolve(address).unwrap().function();
        assert_eq!(function(0xffff_ffff_8100_0000), "ip_rcv");
        assert_eq!(function(0xffff_ffff_8100_0100), "ip_rcv_core");
        assert_eq!(function(0xffff_ffff_c000_0400), "nf_tables:nft_last");
    }

    /// Where addresses are hidden, or the list is no list, nothing is found.
    #[test]
    fn hidden_addresses() {
        for kallsyms in ["", "0 T ip_rcv\n0000000000000000 t udp_rcv\n", "x y z\n\n\n12\n12 t\nffff\u{0} T a\n"] {
            let symbols = Symbolizer::canned(kallsyms);
            for address in [0, 1, 0x11, 0x12, 0x13, 0xffff, u64::MAX] {
                assert_eq!(text(&symbols, address), None, "{kallsyms:?} {address:#x}");
            }
        }
    }

    /// What happens to modules is noticed, and nothing is read for what can't have changed.
    #[test]
    fn follows_modules() {
        static READINGS: AtomicUsize = AtomicUsize::new(0);
        static LOADED: AtomicU64 = AtomicU64::new(0);
        let kallsyms = || {
            READINGS.fetch_add(1, Ordering::Relaxed);
            let module = LOADED.load(Ordering::Relaxed);
            Table::parse(format!("1000 T a\n2000 D d\n9000 t m{module}\t[m]\n").as_bytes())
        };
        let modules = || LOADED.load(Ordering::Relaxed);
        let start = Instant::now();
        let symbols = Symbolizer::new(Source { kallsyms: Box::new(kallsyms), modules: Box::new(modules) }, start);
        let at = |address, ms| {
            let found = symbols.resolve_at(address, start + Duration::from_millis(ms));
            (found.map(|symbol| symbol.name.as_str()), READINGS.load(Ordering::Relaxed))
        };
        assert_eq!(at(0x1000, 5_000), (Some("a"), 1));
        assert_eq!(at(0x9000, 5_000), (Some("m0"), 1), "no other is loaded");
        LOADED.store(1, Ordering::Relaxed);
        assert_eq!(at(0x9000, 5_999), (Some("m0"), 1), "it was looked at less than a second ago");
        assert_eq!(at(0x1000, 6_000), (Some("a"), 1));
        assert_eq!(at(0x9000, 6_000), (Some("m1"), 2));
        // Who asks for a known one first doesn't keep the other from being read.
        assert_eq!((at(0x9000, 7_500), at(0x8_0000, 7_500)), ((Some("m1"), 2), (None, 3)));
        // Nobody knows this one: after 1 s, 2 s, 4 s and so on.
        let mut readings = Vec::new();
        for ms in (7_000..200_000).step_by(500) {
            let before = READINGS.load(Ordering::Relaxed);
            if at(0x8_0000, ms) == (None, before + 1) {
                readings.push(ms / 1000);
            }
        }
        assert_eq!(readings, [9, 13, 21, 37, 69, 133, 197]);
        LOADED.store(2, Ordering::Relaxed);
        assert_eq!(at(0x9000, 201_000).0, Some("m2"), "however long nothing has been of use");
    }

    /// A process that gives up its privileges keeps what can't have changed, and no more.
    #[test]
    fn without_privileges() {
        static DROPPED: AtomicU64 = AtomicU64::new(0);
        let text =
            |dropped| if dropped == 0 { "1000 T a\n2000 T _etext\n9000 t m\t[m]\n" } else { "0 T a\n0 t m\t[m]\n" };
        let kallsyms = move || Table::parse(text(DROPPED.load(Ordering::Relaxed)).as_bytes());
        let modules = || DROPPED.load(Ordering::Relaxed);
        let start = Instant::now();
        let symbols = Symbolizer::new(Source { kallsyms: Box::new(kallsyms), modules: Box::new(modules) }, start);
        let at = |address, s| Some(symbols.resolve_at(address, start + Duration::from_secs(s))?.name.as_str());
        assert_eq!((at(0x1001, 1), at(0x9001, 1)), (Some("a"), Some("m")));
        DROPPED.store(1, Ordering::Relaxed);
        assert_eq!((at(0x9001, 2), at(0x1001, 2)), (None, Some("a")));
    }

    /// On the kernel that runs the test: where a function is, it is found; none, where addresses are hidden.
    #[test]
    fn reads_this_kernel() {
        let kallsyms = fs::read_to_string(KALLSYMS).unwrap_or_default();
        let line = kallsyms.lines().find(|line| line.ends_with(" T ip_rcv")).unwrap_or("0 T ip_rcv");
        let address = u64::from_str_radix(line.split(' ').next().unwrap_or_default(), 16).unwrap();
        let found = Symbolizer::shared().resolve(address);
        let expected = (address != 0).then(|| "ip_rcv+0x0".to_owned());
        assert_eq!(found.map(|symbol| symbol.to_string()), expected);
    }
}
