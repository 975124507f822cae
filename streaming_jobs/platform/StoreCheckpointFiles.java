package recourse;

import java.io.FileNotFoundException;
import java.io.IOException;
import java.util.Collections;
import java.util.UUID;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.BulkDelete;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileAlreadyExistsException;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.FutureDataInputStreamBuilder;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.PathFilter;
import org.apache.hadoop.fs.s3a.RemoteFileChangedException;
import org.apache.hadoop.util.functional.FutureIO;
import org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager;

/**
 * Spark's checkpoint on S3: each file is one PUT under its own name.
 *
 * An object is whole or absent, so no file has a temporary name, and nothing is renamed or looked for before it is
 * written. What may exist once only (offsets/N, commits/N, metadata) is written under the condition that there is no
 * such object; another driver's is then refused by the store. Folders do not exist.
 *
 * Janino compiles it: no lambdas, no type parameters.
 */
public class StoreCheckpointFiles implements CheckpointFileManager {
    private static final String ONLY_NEW = "fs.option.create.conditional.overwrite";
    private static final String WITHOUT_A_LOOK = "fs.s3a.create.performance";
    private static final String WRITER = "recourse-writer";

    private final Path root;
    private final FileSystem files;
    private volatile Path newest = null;

    public StoreCheckpointFiles(Path root, Configuration hadoop) throws IOException {
        this.root = root;
        this.files = root.getFileSystem(hadoop);
    }

    public CheckpointFileManager.CancellableFSDataOutputStream createAtomic(Path path, boolean overwrite)
            throws IOException {
        String writer = UUID.randomUUID().toString();
        FSDataOutputStreamBuilder create = files.createFile(path);
        create.must(WITHOUT_A_LOOK, true);
        if (!overwrite) {
            create.must(ONLY_NEW, true);
            create.must("fs.s3a.create.header." + WRITER, writer);
        }
        return new Upload((FSDataOutputStream) create.build(), this, path, overwrite ? null : writer);
    }

    public FSDataInputStream open(Path path) throws IOException {
        FutureDataInputStreamBuilder open = files.openFile(path);
        open.opt("fs.option.openfile.read.policy", "whole-file");
        return (FSDataInputStream) FutureIO.awaitFuture(open.build());
    }

    public FileStatus[] list(Path path, PathFilter filter) throws IOException {
        try {
            return files.listStatus(path, filter);
        } catch (FileNotFoundException nothing) {
            return new FileStatus[0];
        }
    }

    public void mkdirs(Path path) {
    }

    /**
     * Spark asks for offsets/N and commits/N only before it writes them. After offsets/N - 1 by this very query the
     * answer is no without a request: the write itself is refused if another driver was first.
     */
    public boolean exists(Path path) throws IOException {
        if (followsNewest(path)) {
            return false;
        }
        String folder = path.getParent() == null ? "" : path.getParent().getName();
        if (folder.equals("offsets") || folder.equals("commits")) {
            return files.isFile(path);  // one request; a folder would take a second one to find
        }
        return files.exists(path);
    }

    private boolean followsNewest(Path path) {
        Path before = newest;
        return before != null && path.getParent().equals(before.getParent())
            && number(before) >= 0 && number(path) == number(before) + 1;
    }

    /** The batch of a file of offsets or commits, -1 for any other name. */
    private static long number(Path path) {
        try {
            return Long.parseLong(path.getName());
        } catch (NumberFormatException other) {
            return -1;
        }
    }

    /** Delete a file; Spark deletes folders only of temporary checkpoints, which are never here. */
    public void delete(Path path) throws IOException {
        BulkDelete deletion = files.createBulkDelete(path.getParent());
        try {
            if (!deletion.bulkDelete(Collections.singletonList(path)).isEmpty()) {
                throw new IOException("the store did not delete " + path);
            }
        } finally {
            deletion.close();
        }
    }

    public boolean isLocal() {
        return false;
    }

    public Path createCheckpointDirectory() {
        return files.makeQualified(root);
    }

    /** An object that is there once it is closed, and never if it is cancelled before. */
    static class Upload extends CheckpointFileManager.CancellableFSDataOutputStream {
        private final FSDataOutputStream stream;
        private final StoreCheckpointFiles manager;
        private final Path path;
        private final String writer;
        private boolean ended = false;

        /** `writer` tells this write of a new object from any other; null for a write that replaces. */
        Upload(FSDataOutputStream stream, StoreCheckpointFiles manager, Path path, String writer) {
            super(stream);
            this.stream = stream;
            this.manager = manager;
            this.path = path;
            this.writer = writer;
        }

        public synchronized void close() throws IOException {
            if (ended) {
                return;
            }
            ended = true;
            try {
                stream.close();
            } catch (IOException error) {
                if (writer == null || !isOurs()) {
                    throw error instanceof RemoteFileChangedException
                        ? (IOException) new FileAlreadyExistsException(path + " exists").initCause(error)
                        : error;
                }
            }
            if (writer != null) {
                manager.newest = path;
            }
        }

        public synchronized void cancel() {
            if (!ended) {
                ended = true;
                stream.abort();
            }
        }

        /** The store may have lost the answer to our write, and then refuses its repetition. */
        private boolean isOurs() throws IOException {
            try {
                byte[] found = manager.files.getXAttr(path, "header." + WRITER);
                return found != null && new String(found, "UTF-8").equals(writer);
            } catch (FileNotFoundException nothing) {
                return false;
            }
        }
    }
}
