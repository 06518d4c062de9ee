/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vmenv-mkinitramfs: packs files, ELF programs with their libraries, and kernel modules in load order into an initramfs.
 *
 * The same input gives the same bytes: entries are sorted, times and owners are 0. Modules go to /modules decompressed,
 * with /modules/order listing one a line ("FILE.ko [OPTION=VALUE]...") in the order in which they are to be loaded.
 */
#include <archive.h>
#include <archive_entry.h>
#include <dirent.h>
#include <elf.h>
#include <getopt.h>
#include <libkmod.h>
#include <limits.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <vmenv/util.h>

#define NODES_MAX 100000u
#define MODULE_MAX (64u << 20) /* a decompressed module */
#define DEPTH_MAX 64

struct node {
	char *path;   /* in the initramfs, without a leading slash */
	char *source; /* the file, or NULL */
	char *text;   /* content made here, or a symlink's target */
	size_t text_length;
	mode_t mode;
};

struct pack {
	struct node *nodes;
	size_t count, room;
	char *order; /* what /modules/order will hold */
	size_t order_length;
	struct kmod_ctx *kmod;
};

static const struct option long_options[] = {
	{ "modules-dir", required_argument, NULL, 'd' },
	{ "kernel-version", required_argument, NULL, 'k' },
	{ "module", required_argument, NULL, 'm' },
	{ "add", required_argument, NULL, 'a' },
	{ "symlink", required_argument, NULL, 's' },
	{ "dir", required_argument, NULL, 'D' },
	{ "compress", required_argument, NULL, 'c' },
	{ "output", required_argument, NULL, 'o' },
	{ "help", no_argument, NULL, 'h' },
	{ NULL, 0, NULL, 0 },
};

static const char usage[] =
	"usage: vmenv-mkinitramfs [OPTION]... --output FILE\n"
	"  --modules-dir DIR       an unpacked kernel package, or its lib/modules\n"
	"  --kernel-version V      which of DIR's kernels (default: the only one)\n"
	"  --module 'NAME [OPT]..' a module, with what it depends on before it; loaded in the order given\n"
	"  --add FILE:DEST         a file or a whole directory; an ELF program brings its shared libraries\n"
	"  --symlink TARGET:PATH   a symbolic link\n"
	"  --dir PATH              an empty directory\n"
	"  --compress none|gzip|zstd|xz   (default none)\n"
	"  --output FILE\n";

static struct node *find(struct pack *p, const char *path)
{
	for (size_t i = 0; i < p->count; i++)
		if (strcmp(p->nodes[i].path, path) == 0)
			return &p->nodes[i];
	return NULL;
}

/* Adds one entry; takes `text` over. A second entry of the same name must mean the same. */
static int add_node(struct pack *p, const char *path, mode_t mode, const char *source, char *text, size_t text_length,
		    struct err *e)
{
	AUTO_FREE char *own = text, *copy = NULL, *from = NULL;
	struct node *old;

	while (*path == '/')
		path++;
	old = find(p, path);
	if (old) {
		bool same = (old->mode & S_IFMT) == (mode & S_IFMT) &&
			    (S_ISDIR(mode) || (source && old->source && strcmp(source, old->source) == 0) ||
			     (S_ISLNK(mode) && text && strcmp(text, old->text) == 0));

		return same ? 0 : err_set(e, EEXIST, "two different entries want to be /%s", path);
	}
	if (p->count == NODES_MAX)
		return err_set(e, E2BIG, "more than %u entries", NODES_MAX);
	if (p->count == p->room) {
		size_t room = p->room ? p->room * 2 : 64;
		struct node *nodes = realloc(p->nodes, room * sizeof(*nodes));

		if (!nodes)
			return err_set(e, ENOMEM, "out of memory");
		p->nodes = nodes;
		p->room = room;
	}
	copy = strdup(path);
	from = source ? strdup(source) : NULL;
	if (!copy || (source && !from))
		return err_set(e, ENOMEM, "out of memory");
	p->nodes[p->count++] = (struct node){ .path = steal_ptr(&copy), .source = steal_ptr(&from),
					      .text = steal_ptr(&own), .text_length = text_length, .mode = mode };
	return 0;
}

static int add_parents(struct pack *p, const char *path, struct err *e)
{
	char dir[PATH_MAX];
	int r;

	while (*path == '/')
		path++;
	if (strlen(path) >= sizeof(dir) || *path == '\0')
		return err_set(e, EINVAL, "bad destination '%s'", path);
	for (const char *s = strchr(path, '/'); s; s = strchr(s + 1, '/')) {
		const struct node *n;

		memcpy(dir, path, (size_t)(s - path));
		dir[s - path] = '\0';
		n = find(p, dir);
		if (n && !S_ISDIR(n->mode))
			return err_set(e, ENOTDIR, "/%s is not a directory, so /%s cannot be in it", dir, path);
		r = n ? 0 : add_node(p, dir, S_IFDIR | 0755, NULL, NULL, 0, e);
		if (r < 0)
			return r;
	}
	return 0;
}

static int add_path(struct pack *p, const char *source, const char *dest, int depth, struct err *e);

/* A mapped ELF file, with every access checked against its size. */
struct elf {
	const uint8_t *data;
	size_t size;
};

static const void *elf_at(const struct elf *f, uint64_t offset, uint64_t size)
{
	return offset <= f->size && size <= f->size - offset ? f->data + offset : NULL;
}

static const char *elf_string(const struct elf *f, uint64_t offset)
{
	return offset < f->size && memchr(f->data + offset, 0, f->size - offset) ? (const char *)f->data + offset : NULL;
}

static uint64_t elf_offset_of(const struct elf *f, const Elf64_Ehdr *h, uint64_t address)
{
	for (int i = 0; i < h->e_phnum; i++) {
		const Elf64_Phdr *ph = elf_at(f, h->e_phoff + (uint64_t)i * sizeof(*ph), sizeof(*ph));

		if (ph && ph->p_type == PT_LOAD && address >= ph->p_vaddr && address - ph->p_vaddr < ph->p_filesz)
			return address - ph->p_vaddr + ph->p_offset;
	}
	return UINT64_MAX;
}

/* Finds `name` as the dynamic linker would: the file's run path, then the usual folders. */
static int find_library(const char *name, const char *runpath, const char *origin, char out[PATH_MAX])
{
	static const char usual[] = "/lib/x86_64-linux-gnu:/usr/lib/x86_64-linux-gnu:/lib64:/usr/lib64:/lib:/usr/lib:"
				    "/usr/local/lib/x86_64-linux-gnu:/usr/local/lib";
	const char *lists[] = { runpath ? runpath : "", usual };

	for (size_t i = 0; i < ARRAY_SIZE(lists); i++)
		for (const char *s = lists[i]; *s; s += strspn(s, ":")) {
			int n = (int)strcspn(s, ":");
			int length;

			if (n > 7 && strncmp(s, "$ORIGIN", 7) == 0)
				length = snprintf(out, PATH_MAX, "%s%.*s/%s", origin, n - 7, s + 7, name);
			else if (n == 7 && strncmp(s, "$ORIGIN", 7) == 0)
				length = snprintf(out, PATH_MAX, "%s/%s", origin, name);
			else
				length = snprintf(out, PATH_MAX, "%.*s/%s", n, s, name);
			if (length < PATH_MAX && access(out, R_OK) == 0)
				return 0;
			s += n;
		}
	return -ENOENT;
}

static int add_libraries(struct pack *p, const struct elf *f, const char *source, int depth, struct err *e)
{
	const Elf64_Ehdr *h = elf_at(f, 0, sizeof(*h));
	const Elf64_Dyn *dyn = NULL;
	const char *runpath = NULL;
	uint64_t count = 0, strings = UINT64_MAX;
	char origin[PATH_MAX], path[PATH_MAX];
	int r = 0;

	if (!h || memcmp(h->e_ident, ELFMAG, SELFMAG) != 0 || h->e_ident[EI_CLASS] != ELFCLASS64)
		return 0;
	for (int i = 0; i < h->e_phnum; i++) {
		const Elf64_Phdr *ph = elf_at(f, h->e_phoff + (uint64_t)i * sizeof(*ph), sizeof(*ph));

		if (!ph)
			break;
		if (ph->p_type == PT_INTERP) {
			const char *interp = elf_string(f, ph->p_offset);

			if (interp)
				r = add_path(p, interp, interp, depth + 1, e);
			if (r < 0)
				return r;
		} else if (ph->p_type == PT_DYNAMIC) {
			dyn = elf_at(f, ph->p_offset, ph->p_filesz);
			count = dyn ? ph->p_filesz / sizeof(*dyn) : 0;
		}
	}
	for (uint64_t i = 0; i < count; i++)
		if (dyn[i].d_tag == DT_STRTAB)
			strings = elf_offset_of(f, h, dyn[i].d_un.d_ptr);
	if (strings == UINT64_MAX)
		return 0;
	for (uint64_t i = 0; i < count; i++)
		if (dyn[i].d_tag == DT_RUNPATH || dyn[i].d_tag == DT_RPATH)
			runpath = elf_string(f, strings + dyn[i].d_un.d_val);
	if (!realpath(source, origin))
		return err_set(e, errno, "%s: %s", source, strerror(errno));
	*strrchr(origin, '/') = '\0';
	for (uint64_t i = 0; i < count && dyn[i].d_tag != DT_NULL; i++) {
		const char *name;

		if (dyn[i].d_tag != DT_NEEDED)
			continue;
		name = elf_string(f, strings + dyn[i].d_un.d_val);
		if (!name || find_library(name, runpath, origin, path) < 0)
			return err_set(e, ENOENT, "%s needs the library %s, which is not here", source, name ? name : "?");
		r = add_path(p, path, path, depth + 1, e);
		if (r < 0)
			return r;
	}
	return 0;
}

static int add_file(struct pack *p, const char *source, const char *dest, const struct stat *st, int depth, struct err *e)
{
	AUTO_CLOSE int fd = open(source, O_RDONLY | O_CLOEXEC);
	struct elf f = { .size = (size_t)st->st_size };
	void *map;
	int r;

	if (fd < 0)
		return err_set(e, errno, "%s: %s", source, strerror(errno));
	r = add_node(p, dest, S_IFREG | (st->st_mode & 07777), source, NULL, 0, e);
	if (r < 0 || f.size < sizeof(Elf64_Ehdr))
		return r;
	map = mmap(NULL, f.size, PROT_READ, MAP_PRIVATE, fd, 0);
	if (map == MAP_FAILED)
		return err_set(e, errno, "%s: %s", source, strerror(errno));
	f.data = map;
	r = add_libraries(p, &f, source, depth, e);
	munmap(map, f.size);
	return r;
}

static int add_directory(struct pack *p, const char *source, const char *dest, int depth, struct err *e)
{
	char from[PATH_MAX], to[PATH_MAX];
	struct dirent *d;
	DIR *dir;
	int r = add_node(p, dest, S_IFDIR | 0755, NULL, NULL, 0, e);

	if (r < 0)
		return r;
	dir = opendir(source);
	if (!dir)
		return err_set(e, errno, "%s: %s", source, strerror(errno));
	while (r == 0 && (d = readdir(dir))) {
		if (strcmp(d->d_name, ".") == 0 || strcmp(d->d_name, "..") == 0)
			continue;
		if (snprintf(from, sizeof(from), "%s/%s", source, d->d_name) >= PATH_MAX ||
		    snprintf(to, sizeof(to), "%s/%s", dest, d->d_name) >= PATH_MAX)
			r = err_set(e, ENAMETOOLONG, "%s: the path is too long", d->d_name);
		else
			r = add_path(p, from, to, depth + 1, e);
	}
	closedir(dir);
	return r;
}

/* What the user names is followed when a symlink; symlinks inside an added directory stay symlinks. */
static int add_path(struct pack *p, const char *source, const char *dest, int depth, struct err *e)
{
	bool inside = depth > 0 && strcmp(source, dest) != 0;
	struct stat st;
	int r;

	while (*dest == '/')
		dest++;
	if (depth > DEPTH_MAX)
		return err_set(e, ELOOP, "%s: nested too deeply", source);
	if ((inside ? lstat : stat)(source, &st) < 0)
		return err_set(e, errno, "%s: %s", source, strerror(errno));
	if (!find(p, dest) || S_ISDIR(st.st_mode)) {
		r = add_parents(p, dest, e);
		if (r < 0)
			return r;
	} else if (depth > 0 && S_ISREG(st.st_mode)) {
		return 0; /* a library that is there already */
	}
	if (S_ISDIR(st.st_mode))
		return add_directory(p, source, dest, depth, e);
	if (S_ISREG(st.st_mode))
		return add_file(p, source, dest, &st, depth, e);
	if (S_ISLNK(st.st_mode)) {
		char target[PATH_MAX];
		ssize_t n = readlink(source, target, sizeof(target) - 1);

		if (n < 0)
			return err_set(e, errno, "%s: %s", source, strerror(errno));
		target[n] = '\0';
		return add_node(p, dest, S_IFLNK | 0777, NULL, strdup(target), (size_t)n, e);
	}
	return err_set(e, EINVAL, "%s is neither a file, a directory nor a symlink", source);
}

/* Splits "LEFT:RIGHT" in place at the last colon. */
static int split(char *s, char **right, struct err *e)
{
	char *colon = strrchr(s, ':');

	if (!colon || colon == s || colon[1] == '\0')
		return err_set(e, EINVAL, "'%s' is not of the form FILE:DEST", s);
	*colon = '\0';
	*right = colon + 1;
	return 0;
}

/* Reads a file whole, decompressed whatever it is compressed with. */
static int read_plain(const char *path, char **out, size_t *length, struct err *e)
{
	struct archive *a = archive_read_new();
	struct archive_entry *entry;
	AUTO_FREE char *data = NULL;
	size_t n = 0, room = 0;
	ssize_t got = 0;
	int r = 0;

	if (!a)
		return err_set(e, ENOMEM, "out of memory");
	archive_read_support_filter_all(a);
	archive_read_support_format_raw(a);
	if (archive_read_open_filename(a, path, 1 << 16) != ARCHIVE_OK || archive_read_next_header(a, &entry) != ARCHIVE_OK) {
		r = err_set(e, EIO, "%s: %s", path, archive_error_string(a));
		archive_read_free(a);
		return r;
	}
	do {
		if (n == room) {
			char *more;

			room = room ? room * 2 : 1 << 18;
			more = room <= MODULE_MAX ? realloc(data, room) : NULL;
			if (!more) {
				r = err_set(e, EFBIG, "%s: over %u bytes, or out of memory", path, MODULE_MAX);
				break;
			}
			data = more;
		}
		got = archive_read_data(a, data + n, room - n);
		if (got < 0)
			r = err_set(e, EIO, "%s: %s", path, archive_error_string(a));
		else
			n += (size_t)got;
	} while (got > 0);
	archive_read_free(a);
	if (r == 0) {
		*out = steal_ptr(&data);
		*length = n;
	}
	return r;
}

static int add_module_file(struct pack *p, const char *path, const char *name, const char *options, struct err *e)
{
	AUTO_FREE char *content = NULL, *line = NULL, *dest = NULL;
	char *more;
	size_t length = 0;
	int n, r;

	if (asprintf(&dest, "modules/%s.ko", name) < 0) {
		dest = NULL;
		return err_set(e, ENOMEM, "out of memory");
	}
	if (find(p, dest))
		return 0;
	r = read_plain(path, &content, &length, e);
	if (r < 0)
		return r;
	r = add_parents(p, dest, e);
	if (r < 0)
		return r;
	r = add_node(p, dest, S_IFREG | 0644, NULL, steal_ptr(&content), length, e);
	if (r < 0)
		return r;
	n = asprintf(&line, "%s.ko%s%s\n", name, options[0] ? " " : "", options);
	more = n < 0 ? NULL : realloc(p->order, p->order_length + (size_t)n);
	if (!more)
		return err_set(e, ENOMEM, "out of memory");
	memcpy(more + p->order_length, line, (size_t)n);
	p->order = more;
	p->order_length += (size_t)n;
	return 0;
}

/* A module after everything it needs, each once. */
static int add_module(struct pack *p, struct kmod_module *m, const char *options, int depth, struct err *e)
{
	const char *path = kmod_module_get_path(m);
	struct kmod_list *pre = NULL, *post = NULL, *lists[2], *i;
	int r = 0;

	if (depth > DEPTH_MAX)
		return err_set(e, ELOOP, "module %s: its dependencies are nested too deeply", kmod_module_get_name(m));
	if (!path)
		return 0; /* built in */
	if (kmod_module_get_softdeps(m, &pre, &post) < 0)
		pre = post = NULL;
	lists[0] = pre;
	lists[1] = kmod_module_get_dependencies(m);
	for (size_t l = 0; l < ARRAY_SIZE(lists); l++)
		kmod_list_foreach(i, lists[l]) {
			struct kmod_module *needed = kmod_module_get_module(i);

			if (r == 0)
				r = add_module(p, needed, "", depth + 1, e);
			kmod_module_unref(needed);
		}
	if (r == 0)
		r = add_module_file(p, path, kmod_module_get_name(m), options, e);
	kmod_module_unref_list(pre);
	kmod_module_unref_list(post);
	kmod_module_unref_list(lists[1]);
	return r;
}

/* "NAME [OPTION]...", split in place. A module that is built into the kernel is all right. */
static int add_module_named(struct pack *p, char *spec, struct err *e)
{
	char *options = strchr(spec, ' ');
	struct kmod_list *found = NULL, *left = NULL, *i;
	int r;

	if (options)
		*options++ = '\0';
	if (!p->kmod)
		return err_set(e, EINVAL, "--module %s: give --modules-dir before it", spec);
	if (kmod_module_new_from_lookup(p->kmod, spec, &found) < 0 || !found)
		return err_set(e, ENOENT, "there is no module %s in %s", spec, kmod_get_dirname(p->kmod));
	r = kmod_module_apply_filter(p->kmod, KMOD_FILTER_BUILTIN, found, &left);
	if (r < 0)
		r = err_set(e, -r, "module %s: %s", spec, strerror(-r));
	kmod_list_foreach(i, left) {
		struct kmod_module *m = kmod_module_get_module(i);

		if (r == 0 && !kmod_module_get_path(m))
			r = err_set(e, ENOENT, "module %s has no file", spec);
		if (r == 0)
			r = add_module(p, m, options ? options : "", 0, e);
		kmod_module_unref(m);
	}
	kmod_module_unref_list(found);
	kmod_module_unref_list(left);
	return r;
}

/* A package just unpacked has no index yet. */
static int run_depmod(const char *base, const char *version, struct err *e)
{
	char *argv[] = { "depmod", "-b", (char *)base, (char *)version, NULL };
	char *envp[] = { "PATH=/sbin:/usr/sbin:/bin:/usr/bin", NULL };
	static const char *const places[] = { "/sbin/depmod", "/usr/sbin/depmod", "/bin/depmod", "/usr/bin/depmod" };
	int status = -1;
	pid_t pid;

	for (size_t i = 0; i < ARRAY_SIZE(places); i++)
		if (access(places[i], X_OK) == 0) {
			if (posix_spawn(&pid, places[i], NULL, NULL, argv, envp) == 0)
				waitpid(pid, &status, 0);
			break;
		}
	return status == 0 ? 0 : err_set(e, EIO, "%s has no module index, and depmod -b %s %s failed", version, base, version);
}

static int open_modules(struct pack *p, const char *dir, const char *version, struct err *e)
{
	const char *const no_config = NULL;
	char base[PATH_MAX], modules[PATH_MAX], path[PATH_MAX + 600], found[256] = "";
	struct dirent *d;
	DIR *list;

	if (snprintf(path, sizeof(path), "%s/lib/modules", dir) >= (int)sizeof(path) || !realpath(dir, base))
		return err_set(e, errno, "%s: %s", dir, strerror(errno));
	if (access(path, F_OK) == 0) {
		if (!realpath(path, modules))
			return err_set(e, errno, "%s: %s", path, strerror(errno));
	} else {
		size_t n = strlen(base);

		strcpy(modules, base);
		if (n > 12 && strcmp(base + n - 12, "/lib/modules") == 0)
			base[n - 12] = '\0';
	}
	if (!version) {
		list = opendir(modules);
		if (!list)
			return err_set(e, errno, "%s: %s", modules, strerror(errno));
		while ((d = readdir(list))) {
			if (d->d_name[0] == '.')
				continue;
			version = version ? "" : strcpy(found, d->d_name);
		}
		closedir(list);
		if (!version || version[0] == '\0')
			return err_set(e, EINVAL, "%s holds %s: say --kernel-version", modules,
				       version ? "more than one kernel" : "no kernel");
	}
	snprintf(path, sizeof(path), "%s/%s/modules.dep.bin", modules, version);
	if (access(path, R_OK) < 0) {
		int r = run_depmod(base, version, e);

		if (r < 0)
			return r;
	}
	*strrchr(path, '/') = '\0';
	p->kmod = kmod_new(path, &no_config);
	return p->kmod ? 0 : err_set(e, ENOENT, "%s: no kernel modules there", path);
}

static int by_path(const void *a, const void *b)
{
	return strcmp(((const struct node *)a)->path, ((const struct node *)b)->path);
}

static int write_source(struct archive *a, const struct node *n, uint64_t size, struct err *e)
{
	char buffer[1 << 14];
	AUTO_CLOSE int fd = open(n->source, O_RDONLY | O_CLOEXEC);
	ssize_t got = 0;

	if (fd < 0)
		return err_set(e, errno, "%s: %s", n->source, strerror(errno));
	while (size > 0 && (got = read(fd, buffer, MIN(sizeof(buffer), size))) > 0) {
		if (archive_write_data(a, buffer, (size_t)got) != got)
			return err_set(e, EIO, "%s", archive_error_string(a));
		size -= (uint64_t)got;
	}
	return size == 0 ? 0 : err_set(e, EIO, "%s changed while it was read", n->source);
}

static int write_node(struct archive *a, struct archive_entry *entry, const struct node *n, int64_t number, struct err *e)
{
	struct stat st = { .st_size = (off_t)n->text_length };

	if (n->source && stat(n->source, &st) < 0)
		return err_set(e, errno, "%s: %s", n->source, strerror(errno));
	archive_entry_clear(entry);
	archive_entry_set_pathname(entry, n->path);
	archive_entry_set_mode(entry, n->mode);
	archive_entry_set_nlink(entry, 1);
	archive_entry_set_ino64(entry, number);
	archive_entry_set_mtime(entry, 0, 0);
	if (S_ISLNK(n->mode))
		archive_entry_set_symlink(entry, n->text);
	archive_entry_set_size(entry, S_ISDIR(n->mode) ? 0 : st.st_size);
	if (archive_write_header(a, entry) != ARCHIVE_OK)
		return err_set(e, EIO, "/%s: %s", n->path, archive_error_string(a));
	if (n->source)
		return write_source(a, n, (uint64_t)st.st_size, e);
	if (S_ISREG(n->mode) && archive_write_data(a, n->text, n->text_length) != (la_ssize_t)n->text_length)
		return err_set(e, EIO, "/%s: %s", n->path, archive_error_string(a));
	return 0;
}

static int write_all(struct pack *p, const char *output, const char *compress, struct err *e)
{
	struct archive *a = archive_write_new();
	struct archive_entry *entry = archive_entry_new();
	int r = 0, bad;

	if (strcmp(compress, "gzip") == 0) {
		/* No time stamp in the header: the same input, the same bytes. */
		bad = archive_write_add_filter_gzip(a) || archive_write_set_filter_option(a, "gzip", "timestamp", NULL);
	} else if (strcmp(compress, "zstd") == 0) {
		bad = archive_write_add_filter_zstd(a);
	} else if (strcmp(compress, "xz") == 0) {
		bad = archive_write_add_filter_xz(a);
	} else {
		bad = strcmp(compress, "none") != 0;
	}
	if (bad)
		r = err_set(e, EINVAL, "--compress %s: none, gzip, zstd or xz", compress);
	if (r == 0 && (archive_write_set_format_cpio_newc(a) != ARCHIVE_OK || archive_write_set_bytes_in_last_block(a, 1) ||
		       archive_write_open_filename(a, output) != ARCHIVE_OK))
		r = err_set(e, EIO, "%s: %s", output, archive_error_string(a));
	qsort(p->nodes, p->count, sizeof(*p->nodes), by_path);
	for (size_t i = 0; r == 0 && i < p->count; i++)
		r = write_node(a, entry, &p->nodes[i], (int64_t)i + 1, e);
	if (r == 0 && archive_write_close(a) != ARCHIVE_OK)
		r = err_set(e, EIO, "%s: %s", output, archive_error_string(a));
	archive_entry_free(entry);
	archive_write_free(a);
	if (r < 0)
		unlink(output);
	return r;
}

static int pack(struct pack *p, int argc, char **argv, struct err *e)
{
	const char *modules_dir = NULL, *version = NULL, *output = NULL, *compress = "none";
	char *right;
	int c, r = 0;

	while (r == 0 && (c = getopt_long(argc, argv, "o:h", long_options, NULL)) != -1) {
		switch (c) {
		case 'd':
			modules_dir = optarg;
			break;
		case 'k':
			version = optarg;
			break;
		case 'm':
			if (!p->kmod && modules_dir)
				r = open_modules(p, modules_dir, version, e);
			if (r == 0)
				r = add_module_named(p, optarg, e);
			break;
		case 'a':
			r = split(optarg, &right, e);
			if (r == 0)
				r = add_path(p, optarg, right, 0, e);
			break;
		case 's':
			r = split(optarg, &right, e);
			if (r == 0)
				r = add_parents(p, right, e);
			if (r == 0)
				r = add_node(p, right, S_IFLNK | 0777, NULL, strdup(optarg), strlen(optarg), e);
			break;
		case 'D':
			r = add_parents(p, optarg, e);
			if (r == 0)
				r = add_node(p, optarg, S_IFDIR | 0755, NULL, NULL, 0, e);
			break;
		case 'c':
			compress = optarg;
			break;
		case 'o':
			output = optarg;
			break;
		case 'h':
			fputs(usage, stdout);
			return 0;
		default:
			return err_set(e, EINVAL, "see --help");
		}
	}
	if (r == 0 && (!output || optind < argc))
		r = err_set(e, EINVAL, "%s: see --help", output ? argv[optind] : "no --output");
	if (r == 0 && p->order)
		r = add_node(p, "modules/order", S_IFREG | 0644, NULL, steal_ptr(&p->order), p->order_length, e);
	return r < 0 ? r : write_all(p, output, compress, e);
}

int main(int argc, char **argv)
{
	struct pack p = { 0 };
	struct err e = { 0 };

	if (pack(&p, argc, argv, &e) < 0) {
		fprintf(stderr, "vmenv-mkinitramfs: %s\n", e.text);
		return 1;
	}
	for (size_t i = 0; i < p.count; i++) {
		free(p.nodes[i].path);
		free(p.nodes[i].source);
		free(p.nodes[i].text);
	}
	free(p.nodes);
	kmod_unref(p.kmod);
	return 0;
}
