//! Modules that are not loaded: what `depmod` knows of them.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::host;

/// The lists of this kernel's modules, read only to explain a failure.
#[derive(Debug, Default)]
pub(super) struct Installed {
    /// `modules.dep`; `None` where nothing is known of the modules, as in a container.
    files: Option<String>,
    /// `modules.builtin`.
    builtin: String,
    /// `modules.symbols`.
    symbols: String,
}

/// Where a module is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    File,
    /// In the kernel itself.
    BuiltIn,
    Nowhere,
    /// Nothing is known of any module.
    Unknown,
}

impl Installed {
    pub(super) fn read() -> Self {
        let dir = Path::new("/lib/modules").join(host::release().unwrap_or_default());
        let text = |name| fs::read_to_string(dir.join(name));
        Self {
            files: text("modules.dep").ok(),
            builtin: text("modules.builtin").unwrap_or_default(),
            symbols: text("modules.symbols").unwrap_or_default(),
        }
    }

    /// Where the module of this name is.
    pub(super) fn find(&self, module: &str) -> Place {
        let is_in = |paths: &str| paths.lines().filter_map(module_of_path).any(|name| same(name, module));
        match &self.files {
            _ if is_in(&self.builtin) => Place::BuiltIn,
            Some(files) if is_in(files) => Place::File,
            Some(_) => Place::Nowhere,
            None => Place::Unknown,
        }
    }

    /// The modules' names.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.files.as_deref().unwrap_or_default().lines().filter_map(module_of_path)
    }

    /// The module that exports this function.
    pub(super) fn exporter(&self, function: &str) -> Option<&str> {
        // Lines are `alias symbol:FUNCTION MODULE`.
        let lines = self.symbols.lines().filter_map(|line| line.strip_prefix("alias symbol:")?.split_once(' '));
        lines.filter(|(name, _)| *name == function).map(|(_, module)| module).next()
    }
}

/// Whether a module is loaded. One that is part of the kernel may have a directory, too, but no state.
pub(super) fn is_loaded(module: &str) -> bool {
    Path::new("/sys/module").join(module).join("initstate").exists()
}

/// How often it is looked whether a module has come.
const LOOK: Duration = Duration::from_millis(50);

/// Waits until one of these modules has been loaded and is ready. Whether one is; if not, it is `deadline`.
pub(crate) fn wait_for_any(modules: &[&str], deadline: Instant) -> bool {
    let is_ready = |module: &&str| {
        let state = fs::read_to_string(Path::new("/sys/module").join(module).join("initstate"));
        state.is_ok_and(|state| state.trim_end() == "live")
    };
    loop {
        if modules.iter().any(is_ready) {
            return true;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        thread::sleep(left.min(LOOK));
    }
}

/// Lines are `DIRECTORY/MODULE.ko`, perhaps with `.xz` or the like, perhaps with a colon and what it depends on.
fn module_of_path(line: &str) -> Option<&str> {
    let path = line.split(':').next()?;
    Some(path.rsplit('/').next()?.split_once(".ko")?.0)
}

/// Files may be named with dashes, but a module's name has underscores for them.
fn same(file: &str, module: &str) -> bool {
    file.len() == module.len() && file.bytes().zip(module.bytes()).all(|(a, b)| a == b || (a, b) == (b'-', b'_'))
}

#[cfg(test)]
impl Installed {
    pub(super) fn canned() -> Self {
        let files = "kernel/net/netfilter/nf_tables.ko.xz: kernel/net/netfilter/nfnetlink.ko.xz\n\
                     kernel/drivers/net/dummy.ko:\nkernel/crypto/sha-new.ko.zst:\n";
        let symbols = "# Aliases for symbols, used by symbol_request().\n\
                       alias symbol:nft_do_chain nf_tables\nalias symbol:nft_do_chain_new nf_new\n";
        let builtin = "kernel/net/sched/sch_fq_codel.ko\n";
        Self { files: Some(files.to_owned()), builtin: builtin.to_owned(), symbols: symbols.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Modules in files, with any compression, and in the kernel itself.
    #[test]
    fn finds_modules() {
        let installed = Installed::canned();
        for (module, place) in [
            ("nf_tables", Place::File),
            ("dummy", Place::File),
            ("sha_new", Place::File),
            ("sch_fq_codel", Place::BuiltIn),
            ("nfnetlink", Place::Nowhere),
            ("dumm", Place::Nowhere),
        ] {
            assert_eq!(installed.find(module), place, "{module}");
        }
        assert_eq!(Installed::default().find("dummy"), Place::Unknown);
        assert_eq!(installed.names().collect::<Vec<_>>(), ["nf_tables", "dummy", "sha-new"]);
    }

    /// Which module exports a function.
    #[test]
    fn finds_exporters() {
        assert_eq!(Installed::canned().exporter("nft_do_chain"), Some("nf_tables"));
        assert_eq!(Installed::canned().exporter("nft_do"), None);
        assert_eq!(Installed::default().exporter("nft_do_chain"), None);
    }

    /// On the kernel that runs the test: nothing of it is loaded under a name that there isn't.
    #[test]
    fn reads_this_kernel() {
        let installed = Installed::read();
        assert!(matches!(installed.find("no_such_module"), Place::Nowhere | Place::Unknown));
        assert!(!is_loaded("no_such_module") && !is_loaded("vmlinux"));
    }

    /// Waiting for what doesn't come ends in time, also if there is none.
    #[test]
    fn waits() {
        let begin = Instant::now();
        assert!(!wait_for_any(&["no_such_module"], begin + Duration::from_millis(120)));
        assert!((120..5_000).contains(&begin.elapsed().as_millis()));
        assert!(!wait_for_any(&["no_such_module"], begin));
    }
}
